"""An engine starts only on verified checkpoints that only root can write to."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from spark_contract.errors import HostToolError
from spark_contract.job import ReceiptProof
from spark_contract.release import Release
from spark_host import jobs
from spark_host.engine import container, serve
from stub_host import REPOSITORY, Host, release_data

from tests.receipts import source_receipt

SHARD, SMALL = "model-1.safetensors", "config.json"


def entry(path: Path) -> dict[str, object]:
    status = path.stat()
    return {
        "path": path.name, "size_bytes": status.st_size, "modified_ns": status.st_mtime_ns,
        "inode": status.st_ino, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }  # fmt: skip


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    homes = (str(REPOSITORY / "files" / home) for home in ("contract", "checkpoint"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(homes))
    made = tmp_path / "tree"
    made.mkdir()
    (made / SHARD).write_bytes(bytes(100_000))
    (made / SMALL).write_text("{}")
    write_receipt(made, [entry(made / SHARD), entry(made / SMALL)])
    return made


def write_receipt(made: Path, entries: list[dict[str, object]]) -> None:
    (made / "receipt.json").write_text(source_receipt("d" * 64, entries))


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(50_000)
        file.write(b"\x01")


def replace(path: Path, *, damaged: bool) -> None:
    status, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes())
    if damaged:
        flip(other)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


def forget_stats(made: Path, *keys: str) -> None:
    receipt = json.loads((made / "receipt.json").read_text())
    for one in receipt["files"]:
        for key in keys:
            del one[key]
    (made / "receipt.json").write_text(json.dumps(receipt))


def proven(host: Host, made: Path) -> list[str]:
    said: list[str] = []
    serve.verify_checkpoints(
        host.release(tree={"path": str(made), "digest": "d" * 64}), said.append
    )
    return said


def test_unchanged_checkpoint_is_not_hashed(host: Host, served: Path) -> None:
    os.chmod(served / SHARD, 0o444)
    os.link(served / SHARD, served.parent / "linked")
    assert proven(host, served) == []


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: replace(path, damaged=True)],
    ids=["a byte changed in place", "another file of the same size and time"],
)
def test_refuses_a_changed_byte(host: Host, served: Path, damage: Callable[[Path], None]) -> None:
    damage(served / SHARD)
    for _ in range(2):  # nor at the next start
        with pytest.raises(HostToolError) as refused:
            proven(host, served)
        assert refused.value.where == str(served / SHARD)
        assert "has sha256" in refused.value.what
        assert "move the directory away and run the deploy again" in refused.value.fix


def test_missing_file_is_named(host: Host, served: Path) -> None:
    (served / SMALL).unlink()
    with pytest.raises(HostToolError, match=r"config\.json: is gone"):
        proven(host, served)


def test_touched_files_are_hashed_once(host: Host, served: Path) -> None:
    before = json.loads((served / "receipt.json").read_text())
    os.utime(served / SHARD)
    replace(served / SMALL, damaged=False)
    [said] = proven(host, served)
    assert said.startswith("phase=verify 2 of 2 files")
    assert proven(host, served) == []
    receipt = json.loads((served / "receipt.json").read_text())
    assert receipt["files"] == [entry(served / SHARD), entry(served / SMALL)]
    assert {**receipt, "files": 0} == {**before, "files": 0}


@pytest.mark.parametrize("keys", [("inode",), ("inode", "modified_ns")])
def test_receipt_without_stats_is_completed_by_hashing(
    host: Host, served: Path, keys: tuple[str, ...]
) -> None:
    forget_stats(served, *keys)
    assert len(proven(host, served)) == 1
    assert proven(host, served) == []
    forget_stats(served, *keys)
    replace(served / SHARD, damaged=True)
    with pytest.raises(HostToolError, match="has sha256"):
        proven(host, served)


def test_rollout_verifies_before_the_old_engine_stops(
    host: Host, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "check_artifacts", lambda _: None)
    release = host.release(tree={"path": str(served), "digest": "d" * 64})
    assert serve.problem(release, host.paths) is None
    flip(served / SHARD)
    problem = serve.problem(release, host.paths)
    assert problem is not None
    assert "has sha256" in problem.what


def test_start_verifies_after_removing_the_container(
    host: Host, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(serve.docker, "is_up", lambda: True)
    monkeypatch.setattr(serve.docker, "remove_container", lambda _: order.append("removed"))
    monkeypatch.setattr(serve, "check_artifacts", lambda _: order.append("parts"))
    flip(served / SHARD)
    release = host.release(tree={"path": str(served), "digest": "d" * 64})
    with pytest.raises(HostToolError, match="has sha256"):
        serve.prepare(release.name, host.paths)
    assert order == ["removed", "parts"]


def test_drafter_and_adapter_are_verified_too(host: Host, served: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / SHARD).write_bytes(bytes(100_000))
    write_receipt(drafter, [entry(drafter / SHARD)])
    both = [{"path": str(path), "digest": "d" * 64} for path in (served, drafter)]
    release = host.release(tree=both[0], beside=both[1:])
    serve.check_checkpoints(release)
    other = host.release(tree=both[0], beside=[{**both[1], "digest": "e" * 64}])
    with pytest.raises(HostToolError) as refused:
        serve.check_checkpoints(other)
    assert str(drafter) in refused.value.where
    replace(drafter / SHARD, damaged=True)
    with pytest.raises(HostToolError, match="drafter"):
        serve.verify_checkpoints(release, print)


NOBODY = pwd.getpwnam("nobody")


def of(host: Host, user: str, **more: object) -> Release:
    return host.release(engine={**release_data()["engine"], "user": user, **more})


def refusal(release: Release) -> HostToolError:
    with pytest.raises(HostToolError) as refused:
        serve.check_checkpoints(release)
    return refused.value


def test_container_runs_as_numeric_user(host: Host) -> None:
    argv = container.docker_argv(of(host, "nobody"), host.paths)
    place = argv.index("--user")
    assert argv[place + 1] == f"{NOBODY.pw_uid}:{NOBODY.pw_gid}"
    assert place < argv.index("spark-vllm:stub")


def test_missing_account_names_the_fix(host: Host) -> None:
    with pytest.raises(HostToolError, match=r"spark-nobody-knows[\s\S]*systemd-sysusers"):
        container.docker_argv(of(host, "spark-nobody-knows"), host.paths)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
@pytest.mark.parametrize(
    "what", ["model.safetensors", "receipt.json", "", "more", "more/tokenizer"]
)
@pytest.mark.parametrize(("owner", "mode"), [(NOBODY.pw_uid, 0o755), (0, 0o775), (0, 0o757)])
def test_refuses_checkpoint_writable_by_others(
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
    serve.check_checkpoints(release)
    assert jobs.receipt_holds(held)

    os.chown(tree / what, owner, 0)
    (tree / what).chmod(mode)

    problem = refusal(release)
    assert str(tree / what).rstrip("/") in problem.what
    assert "run the deploy again" in problem.fix
    # The job is done only while no other account can write to the checkpoint.
    assert not jobs.receipt_holds(held)


def test_refuses_link_in_a_checkpoint(host: Host, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir(mode=0o755)
    (tree / "receipt.json").write_text(source_receipt("d"))
    (tree / "model.safetensors").symlink_to("/etc/hostname")
    release = host.release(tree={"path": str(tree), "digest": "d"})
    assert "is a link" in refusal(release).what


@pytest.mark.parametrize(("what", "mode"), [("model.safetensors", 0o600), ("", 0o700)])
def test_refuses_checkpoint_that_the_engine_cannot_read(
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
    serve.check_checkpoints(release)

    (tree / what).chmod(mode)

    problem = refusal(release)
    assert problem.where == str(tree / what).rstrip("/")
    assert "chmod o+rX" in problem.fix
