"""The engine is not root in its container, and owns on the host what it has to write."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from spark_contract.errors import HostToolError
from spark_contract.job import ReceiptProof
from spark_contract.release import Release
from spark_host.engine import artifacts, container
from spark_host.jobs import jobs
from stub_host import Host, release_data

from tests.receipts import source_receipt

NOBODY = pwd.getpwnam("nobody")


def of(host: Host, user: str, **more: object) -> Release:
    return host.release(engine={**release_data()["engine"], "user": user, **more})


def refusal(release: Release) -> HostToolError:
    with pytest.raises(HostToolError) as refused:
        artifacts.check_checkpoints(release)
    return refused.value


def test_docker_starts_the_engine_as_its_account_by_number(host: Host) -> None:
    argv = container.docker_argv(of(host, "nobody"), host.paths)
    place = argv.index("--user")
    assert argv[place + 1] == f"{NOBODY.pw_uid}:{NOBODY.pw_gid}"
    assert place < argv.index("spark-vllm:stub")


def test_a_missing_account_is_named_with_the_way_to_make_it(host: Host) -> None:
    with pytest.raises(HostToolError, match=r"spark-nobody-knows[\s\S]*systemd-sysusers"):
        container.docker_argv(of(host, "spark-nobody-knows"), host.paths)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
@pytest.mark.parametrize(
    "what", ["model.safetensors", "receipt.json", "", "more", "more/tokenizer"]
)
@pytest.mark.parametrize(("owner", "mode"), [(NOBODY.pw_uid, 0o755), (0, 0o775), (0, 0o757)])
def test_a_tree_that_somebody_else_could_write_to_starts_no_engine_and_is_made_anew(
    host: Host, tmp_path: Path, what: str, owner: int, mode: int
) -> None:
    tree = tmp_path / "tree"
    (tree / "more").mkdir(mode=0o755, parents=True)
    (tree / "model.safetensors").write_bytes(b"x")
    (tree / "more/tokenizer").write_bytes(b"x")
    (tree / "receipt.json").write_text(source_receipt("d"))
    release = host.release(
        tree={"path": str(tree), "digest": "d"},
        engine={**release_data()["engine"], "user": "nobody"},
    )
    held = ReceiptProof(str(tree / "receipt.json"), "d")
    artifacts.check_checkpoints(release)
    assert jobs.receipt_holds(held)

    os.chown(tree / what, owner, 0)
    (tree / what).chmod(mode)

    problem = refusal(release)
    assert str(tree / what).rstrip("/") in problem.what
    assert "run the deploy again" in problem.fix
    # The job that makes the tree is done only while nobody else can change what it proved.
    assert not jobs.receipt_holds(held)


def test_a_link_in_a_tree_is_refused(host: Host, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir(mode=0o755)
    (tree / "receipt.json").write_text(source_receipt("d"))
    (tree / "model.safetensors").symlink_to("/etc/hostname")
    release = host.release(tree={"path": str(tree), "digest": "d"})
    assert "is a link" in refusal(release).what


@pytest.mark.parametrize(("what", "mode"), [("model.safetensors", 0o600), ("", 0o700)])
def test_a_tree_the_engine_could_not_read_is_refused_by_name_before_anything_is_touched(
    host: Host, tmp_path: Path, what: str, mode: int
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir(mode=0o755)
    (tree / "model.safetensors").write_bytes(b"x")
    (tree / "receipt.json").write_text(source_receipt("d"))
    release = host.release(
        tree={"path": str(tree), "digest": "d"},
        engine={**release_data()["engine"], "user": "nobody"},
    )
    artifacts.check_checkpoints(release)

    (tree / what).chmod(mode)

    problem = refusal(release)
    assert problem.where == str(tree / what).rstrip("/")
    assert "chmod o+rX" in problem.fix
