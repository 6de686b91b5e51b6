"""An engine starts only on the bytes that its tree's receipt vouches for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from spark_contract.errors import HostToolError
from spark_host.engine import artifacts, serve
from stub_host import REPOSITORY, Host

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
    """A tree with its receipt, and the builder where a host has it."""
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
    """Put another file in its place, of the same size and time."""
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
    """Prove the tree as a start does; return what was said."""
    said: list[str] = []
    artifacts.verify_checkpoints(
        host.release(tree={"path": str(made), "digest": "d" * 64}), said.append
    )
    return said


def test_a_tree_that_nobody_touched_is_not_read_again(host: Host, served: Path) -> None:
    os.chmod(served / SHARD, 0o444)
    os.link(served / SHARD, served.parent / "linked")
    assert proven(host, served) == []


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: replace(path, damaged=True)],
    ids=["a byte changed in place", "another file of the same size and time"],
)
def test_no_engine_starts_on_a_changed_byte(
    host: Host, served: Path, damage: Callable[[Path], None]
) -> None:
    damage(served / SHARD)
    for _ in range(2):  # nor at the next start
        with pytest.raises(HostToolError) as refused:
            proven(host, served)
        assert refused.value.where == str(served / SHARD)
        assert "has sha256" in refused.value.what
        assert "move the directory away and run the deploy again" in refused.value.fix


def test_a_file_that_is_gone_is_named(host: Host, served: Path) -> None:
    (served / SMALL).unlink()
    with pytest.raises(HostToolError, match=r"config\.json: is gone"):
        proven(host, served)


def test_touched_files_with_the_right_bytes_are_hashed_once(host: Host, served: Path) -> None:
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
def test_a_receipt_from_before_stats_is_completed_by_one_hash(
    host: Host, served: Path, keys: tuple[str, ...]
) -> None:
    forget_stats(served, *keys)
    assert len(proven(host, served)) == 1
    assert proven(host, served) == []
    forget_stats(served, *keys)
    replace(served / SHARD, damaged=True)
    with pytest.raises(HostToolError, match="has sha256"):
        proven(host, served)


def test_a_change_to_it_is_refused_while_the_old_engine_still_serves(
    host: Host, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "check", lambda _: None)
    release = host.release(tree={"path": str(served), "digest": "d" * 64})
    assert serve.problem(release, host.paths) is None
    flip(served / SHARD)
    problem = serve.problem(release, host.paths)
    assert problem is not None
    assert "has sha256" in problem.what


def test_a_start_proves_the_tree_after_the_old_engine_is_gone(
    host: Host, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(serve.docker, "is_up", lambda: True)
    monkeypatch.setattr(serve.docker, "remove_container", lambda _: order.append("removed"))
    monkeypatch.setattr(artifacts, "check", lambda _: order.append("parts"))
    flip(served / SHARD)
    release = host.release(tree={"path": str(served), "digest": "d" * 64})
    with pytest.raises(HostToolError, match="has sha256"):
        serve.prepare(release.name, host.paths)
    assert order == ["removed", "parts"]


def test_a_drafter_or_an_adapter_is_held_to_its_receipt_as_the_tree_is(
    host: Host, served: Path, tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / SHARD).write_bytes(bytes(100_000))
    write_receipt(drafter, [entry(drafter / SHARD)])
    both = [{"path": str(path), "digest": "d" * 64} for path in (served, drafter)]
    release = host.release(tree=both[0], beside=both[1:])
    artifacts.check_checkpoints(release)
    other = host.release(tree=both[0], beside=[{**both[1], "digest": "e" * 64}])
    with pytest.raises(HostToolError) as refused:
        artifacts.check_checkpoints(other)
    assert str(drafter) in refused.value.where
    replace(drafter / SHARD, damaged=True)
    with pytest.raises(HostToolError, match="drafter"):
        artifacts.verify_checkpoints(release, print)
