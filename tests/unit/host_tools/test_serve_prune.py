"""Prune removes only unneeded files and reports the freed space."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from prune_machine import BASE, A, B, C, D, Machine, generations, names, put
from spark_contract import files
from spark_contract.errors import HostToolError
from spark_host.cleanup import prune
from spark_host.records import boot
from spark_host.rollout import steps
from spark_host.rollout.rollout import plan_rollback, rollout_lock


def test_prune_removes_only_unneeded_files(machine: Machine) -> None:
    trees = generations(machine)
    found = machine.look(kept=1)

    assert names(found, "release") == [A, B]
    assert names(found, "tree") == [f"model-{'a' * 12}", f"model-{'b' * 12}"]
    assert names(found, "source") == ["org--old-aaaaaaaaaaaa"]
    assert found.kept == {C: "rollback target", D: "serves"}

    assert machine.prune(kept=1).problems == ()
    assert not trees["a"].exists()
    assert trees["c"].is_dir()
    assert trees["d"].is_dir()
    assert boot.good("main", machine.host.here).previous == (C,)


def test_prune_works_on_a_full_disk(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = generations(machine)

    def write(path: Path, text: str, mode: int = 0o644) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as full:
        full.setattr(files, "write_text", write)
        assert machine.prune(kept=1).problems == ()
    assert not trees["a"].exists()
    assert not trees["b"].exists()
    # The record is corrected by the next prune.
    assert plan_rollback("main", None, steps.this_host(machine.paths)).came.name == D
    assert machine.look(kept=1).items == ()
    assert machine.look(kept=1).kept == {C: "rollback target", D: "serves"}


def test_reported_bytes_match_the_freed_space(machine: Machine) -> None:
    generations(machine)
    promised, before = machine.look(kept=1).bytes, machine.used_bytes()
    machine.prune(kept=1)
    directories = 3 * 4096
    assert 0 <= (before - machine.used_bytes()) - promised <= directories
    assert promised > 3 * 64 * 1024


def test_linked_file_frees_no_space(machine: Machine) -> None:
    trees = generations(machine)
    hub = machine.paths.root / "home"
    hub.mkdir()
    os.link(trees["a"] / "weights", hub / "users-own")
    found = machine.look(kept=1)
    by_name = {Path(item.name).name: item.bytes for item in found.items}
    # Except for the linked weights, only the receipt.
    assert by_name[f"model-{'a' * 12}"] <= 8192 < by_name[f"model-{'b' * 12}"]


def test_second_prune_removes_nothing(machine: Machine) -> None:
    generations(machine)
    machine.prune()
    assert machine.look().items == ()


def test_dry_prune_changes_nothing(machine: Machine) -> None:
    generations(machine)
    before = sorted(machine.paths.root.rglob("*"))
    assert prune.main(["--dry", machine.keep()], machine.paths).items
    assert sorted(machine.paths.root.rglob("*")) == before


def test_planned_releases_and_files_are_kept(machine: Machine) -> None:
    trees = generations(machine)
    machine.image("spark-vllm:ready", "l9", size=50)
    kept = machine.look(
        kept=0, releases=[B], folders=[machine.shown(trees["a"])], images=["spark-vllm:ready"]
    )
    assert names(kept, "release") == [A, C]
    assert names(kept, "tree") == [f"model-{'c' * 12}"]
    assert names(kept, "source") == []  # both are the base of a tree that stays
    assert names(kept, "image") == []


def test_serving_release_is_kept(machine: Machine) -> None:
    generations(machine)
    files.remove(machine.paths.good("main"))
    machine.units[f"spark-serve@{A}.service"] = {"ActiveState": "active"}
    del machine.units[f"spark-serve@{D}.service"]
    assert machine.look(kept=0).kept == {A: "serves"}


def test_stopped_release_is_kept(machine: Machine) -> None:
    generations(machine)
    machine.units.clear()
    files.remove(machine.paths.good("main"))
    put(machine.paths.stopped("main"), {"schema_version": 1, "release": B, "at": "then"})
    assert machine.look(kept=0).kept == {B: "stopped by hand"}


def test_unmanaged_files_are_kept(machine: Machine) -> None:
    generations(machine)
    strangers = [
        machine.folder("models", "my-finetune"),
        machine.folder("models", "looks-like-ours-0123456789ab"),
        machine.folder("models", "other-tool-0123456789ab", receipt='{"kind": "invoice"}'),
        machine.folder("sources", "downloads"),
        machine.folder("cache", "pip"),
    ]
    link = machine.paths.root / "srv/models/linked-0123456789ab"
    link.symlink_to(strangers[0])
    machine.image("ollama/ollama:latest", "x", size=9, label=None)
    machine.image(BASE, "l1", size=100, label=None)  # pulled without a job

    found = machine.look(kept=0)
    machine.prune(kept=0)

    assert all((path / "weights").is_file() for path in strangers)
    assert link.is_symlink()
    assert machine.removed == []
    assert {Path(path).name for path in found.not_ours} >= {path.name for path in strangers}


def test_cache_is_removed_with_its_last_release(machine: Machine) -> None:
    tree = machine.tree("model-111111111111")
    ours = machine.folder("cache", "0123456789ab-mtp2")
    other = machine.folder("cache", "ba9876543210-mtp0")
    machine.good(A, tree, cache=machine.shown(other))
    machine.good(B, tree, cache=machine.shown(ours))
    machine.image("spark-vllm:one", "l1", size=1)
    for folder, letters in ((ours, "bcd"), (other, "a")):
        for letter in letters:
            (folder / f"main-{letter * 12}/nv").mkdir(parents=True)
    (ours / f".{B}.17.pruned").mkdir()
    unused = [f".{B}.17.pruned", C, D, "weights"]
    assert sorted(names(machine.look(kept=0), "cache")) == sorted([other.name, *unused])
    assert sorted(names(machine.look(kept=1), "cache")) == sorted([*unused, "weights"])
    assert machine.prune(kept=1).problems == ()
    assert [path.name for path in ours.iterdir()] == [B]
    assert (other / A / "nv").is_dir()


def test_unreadable_kept_release_stops_the_prune(machine: Machine) -> None:
    trees = generations(machine)
    (machine.paths.releases / D / "release.json").write_text("{")
    with pytest.raises(HostToolError, match="malformed"):
        machine.prune()
    assert all(tree.is_dir() for tree in trees.values())


def test_running_rollout_stops_the_prune(machine: Machine) -> None:
    trees = generations(machine)
    with (
        rollout_lock("main", machine.host.here),
        pytest.raises(HostToolError, match="another change is under way"),
    ):
        machine.prune()
    assert all(tree.is_dir() for tree in trees.values())


@pytest.mark.parametrize("wishes", ["{}", "[]", "nonsense", '{"releases_kept": "many"}'])
def test_unreadable_request_removes_nothing(machine: Machine, wishes: str) -> None:
    trees = generations(machine)
    with pytest.raises(HostToolError, match="what to keep"):
        prune.main([wishes], machine.paths)
    assert all(tree.is_dir() for tree in trees.values())


def test_old_tools_are_removed_unless_linked_or_running(machine: Machine) -> None:
    tools = machine.paths.tools
    old, now, run, site, packages = (
        tools / name for name in ("1" * 12, "2" * 12, "3" * 12, f"site-{'4' * 12}", "site-mine")
    )
    for folder in (old, now, run, site, packages, tools / f"site-{'5' * 12}"):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(100_000))
    (tools / "current").symlink_to(now)
    (tools / "site").symlink_to(site)
    with subprocess.Popen(
        ["sleep", "60"], env={**os.environ, "PYTHONPATH": f"{run}:{site}"}
    ) as process:
        going = prune.plan_prune(prune.read_keep(machine.keep()), machine.paths)
        names = {folder.path.name for folder in going.folders if folder.kind == "tools"}
        process.kill()
    assert names == {"1" * 12, f"site-{'5' * 12}"}
    assert going.bytes[str(old)] >= 100_000
    prune.remove(going, machine.paths)
    assert not old.exists()
    assert now.is_dir()
    assert run.is_dir()
    assert packages.is_dir()
