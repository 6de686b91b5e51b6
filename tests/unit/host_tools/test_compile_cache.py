"""The compile cache of a release: reused, copied from a proven release, or empty."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spark_contract.errors import HostToolError
from spark_contract.records import CompileCache, Finding, Proof
from spark_contract.release import READY, Release, service_of
from spark_contract.tool import COMPILING
from spark_host.engine import compile_cache, container
from spark_host.records import boot, versions
from spark_host.rollout import steps
from spark_host.system import folders
from spark_host.system.host import Host as Machine
from stub_host import Host, release_data

NOBODY = pwd.getpwnam("nobody")
KEY, OTHER_BASE, OTHER_DRAFTS = "0123456789ab-mtp2", "ba9876543210-mtp2", "0123456789ab-mtp0"
PROVEN, CANDIDATE = f"main-{'a' * 12}", f"main-{'b' * 12}"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")


class Caches:
    def __init__(self, host: Host):
        self.host, self.here = host, Machine(host.paths)
        self.reports: list[str] = []

    def release(self, name: str, key: str = KEY) -> Release:
        mount = {"source": f"/srv/cache/{key}", "target": "/cache", "read_only": False}
        engine = {**release_data()["engine"], "mounts": [mount], "user": "nobody"}
        return self.host.release(name, engine=engine, service=service_of(name))

    def start(self, name: str, key: str = KEY) -> Path:
        release = self.release(name, key)
        compile_cache.prepare(release, self.here, self.reports.append)
        return self.host.paths.below(str(release.cache))

    def proven(self, name: str = PROVEN, key: str = KEY) -> Path:
        folder = self.start(name, key)
        boot.record_good(self.release(name, key), self.here)
        (folder / "nv").mkdir()
        (folder / "nv/kernel").write_text(name)
        os.chown(folder / "nv", NOBODY.pw_uid, NOBODY.pw_gid)
        return folder


@pytest.fixture
def caches(host: Host, monkeypatch: pytest.MonkeyPatch) -> Caches:
    monkeypatch.setattr(versions, "driver", lambda: "580.159.03")
    return Caches(host)


def content(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_candidate_writes_only_to_its_copy(caches: Caches) -> None:
    old = caches.proven()
    new = caches.start(CANDIDATE)
    assert content(new) == ["nv", "nv/kernel"]
    assert {new.stat().st_uid, (new / "nv").stat().st_uid} == {NOBODY.pw_uid}
    assert old.parent.stat().st_uid == 0
    assert (new / "nv/kernel").stat().st_ino != (old / "nv/kernel").stat().st_ino
    (new / "nv/kernel").write_text("broken")
    (new / "more").touch()
    assert (old / "nv/kernel").read_text() == PROVEN
    assert content(caches.start(PROVEN)) == ["nv", "nv/kernel"]


@pytest.mark.parametrize("has_source", [True, False])
def test_failed_candidate_keeps_its_cache(caches: Caches, has_source: bool) -> None:
    old = caches.proven() if has_source else None
    new = caches.start(CANDIDATE)
    (new / "compiled").write_text("half")
    assert (caches.start(CANDIDATE) / "compiled").read_text() == "half"
    assert old is None or content(old) == ["nv", "nv/kernel"]


ANSWERED, SILENT = Finding(READY, True, "", 0.0), Finding(READY, False, "", 0.0)
WRONG = Finding("arithmetic", False, "", 0.0)


@pytest.mark.parametrize(
    ("checked_run", "checks", "keeps"),
    [
        ("1", (ANSWERED, WRONG), False),
        ("1", (SILENT,), True),  # out of time
        ("1", (ANSWERED, replace(WRONG, weight="warn")), True),
        ("1", (ANSWERED,), True),
        ("0", (ANSWERED, WRONG), True),  # of an earlier run, because the last run was killed
    ],
)
def test_rejected_candidate_gets_a_new_copy(
    caches: Caches,
    monkeypatch: pytest.MonkeyPatch,
    checked_run: str,
    checks: tuple[Finding, ...],
    keeps: bool,
) -> None:
    caches.proven()
    monkeypatch.setenv("INVOCATION_ID", "1")
    (caches.start(CANDIDATE) / "nv/kernel").write_text("torn")
    release = caches.release(CANDIDATE)
    found = Proof(
        release=CANDIDATE,
        digest=release.digest,
        invocation_id=checked_run,
        level="quick",
        ok=False,
        checked_at="",
        checks=checks,
        versions={},
        engine={},
        portable=False,
        stubbed=(),
    )
    caches.here.disk.write(caches.host.paths.proof(CANDIDATE), found)
    monkeypatch.setenv("INVOCATION_ID", "2")
    assert (caches.start(CANDIDATE) / "nv/kernel").read_text() == ("torn" if keeps else PROVEN)


def test_an_unproven_cache_is_not_copied(caches: Caches) -> None:
    (caches.start(CANDIDATE) / "compiled").touch()
    assert content(caches.start(PROVEN)) == []


def test_an_unproven_cache_of_another_driver_is_dropped(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    (caches.start(CANDIDATE) / "compiled").touch()
    monkeypatch.setattr(versions, "driver", lambda: "590.10")
    assert content(caches.start(CANDIDATE)) == []


def test_a_proven_release_keeps_its_own_cache(caches: Caches) -> None:
    caches.proven()
    new = caches.proven(CANDIDATE, OTHER_DRAFTS)
    assert (caches.start(CANDIDATE, OTHER_DRAFTS) / "nv/kernel").read_text() == CANDIDATE
    assert new.is_dir()


@pytest.mark.parametrize("key", [OTHER_BASE, OTHER_DRAFTS])
def test_another_base_image_or_number_of_drafts_starts_empty(caches: Caches, key: str) -> None:
    caches.proven()
    assert content(caches.start(CANDIDATE, key)) == []


def test_cache_of_another_service_is_not_copied(caches: Caches) -> None:
    caches.proven()
    assert content(caches.start(f"embed-{'c' * 12}")) == []


@pytest.mark.parametrize("name", [PROVEN, CANDIDATE])
def test_another_driver_starts_empty(
    caches: Caches, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    caches.proven()
    monkeypatch.setattr(versions, "driver", lambda: "590.10")
    assert content(caches.start(name)) == []


def test_only_the_start_with_an_empty_cache_compiles(
    caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiles(name: str, run: str) -> bool:
        monkeypatch.setenv("INVOCATION_ID", run)
        caches.start(name)
        release = caches.release(name)
        assert not compile_cache.compiling(release, "another run", caches.here)
        cpu = replace(release, check=replace(release.check, portable=True))
        assert not compile_cache.compiling(cpu, run, caches.here)
        return bool(compile_cache.compiling(release, run, caches.here))

    assert compiles(PROVEN, "1")
    assert compiles(PROVEN, "again")  # the first run was killed
    boot.record_good(caches.release(PROVEN), caches.here)
    assert not compiles(PROVEN, "2")
    assert not compiles(CANDIDATE, "3")


@pytest.mark.parametrize("run", ["1", "2"])
def test_a_rollout_reports_that_its_candidate_compiles(
    caches: Caches, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    monkeypatch.setenv("INVOCATION_ID", "1")
    monkeypatch.setattr(steps, "_REPORT_S", 0)
    caches.start(CANDIDATE)
    states = iter(["activating", "activating", "active"])
    units = SimpleNamespace(
        begin=lambda _: None,
        journal=lambda *_, **__: ["Loading weights took 60 seconds"],
        state=lambda *_: {"ActiveState": next(states), "InvocationID": run, "Job": "1"},
    )
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None)
    host: Any = SimpleNamespace(
        units=units, clock=clock, disk=caches.here.disk, paths=caches.host.paths
    )
    record: Any = SimpleNamespace(report=caches.reports.append)
    steps.start(caches.release(CANDIDATE), host, record)
    assert (COMPILING in caches.reports[-1]) is (run == "1")


def links(folder: Path, outside: Path) -> None:
    (folder / "file").symlink_to(outside / "secret")
    (folder / "folder").symlink_to(outside)


def deep(folder: Path, _: Path) -> None:
    """Nest folders beyond the longest path that the kernel takes and Python's recursion limit."""
    place = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=place)
        below = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)


def special(folder: Path, _: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "unreadable").touch(0o000)
    (folder / "\n\x1b[2J\udcff").touch()


def huge(folder: Path, _: Path) -> None:
    with (folder / "huge").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)


TREES: dict[str, tuple[Callable[[Path, Path], None], bool]] = {
    "links": (links, True), "special files": (special, True), "deep": (deep, False),
    "huge": (huge, False),
}  # fmt: skip


@pytest.mark.parametrize("tree", TREES)
def test_hostile_cache_content_does_not_block_a_start(
    caches: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: str
) -> None:
    plant, is_copied = TREES[tree]
    monkeypatch.setattr(compile_cache, "_MOST_BYTES", 1 << 19)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("root's")
    (outside / "secret").chmod(0o600)
    plant(caches.proven(), outside)
    new = caches.start(CANDIDATE)
    assert bool(list(new.iterdir())) is is_copied
    assert new.stat().st_uid == NOBODY.pw_uid
    assert all(one.is_symlink() for one in new.iterdir() if one.name in ("file", "folder"))
    plant(new / "nv" if is_copied else new, outside)
    caches.start(CANDIDATE)  # continues with it
    monkeypatch.setattr(versions, "driver", lambda: "590.10")
    assert content(caches.start(CANDIDATE)) == []
    assert (outside / "secret").read_text() == "root's"
    assert ((outside / "secret").stat().st_uid, content(outside)) == (0, ["secret"])
    assert folders.remove_tree(new.parent)


def test_interrupted_copy_is_repeated(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    caches.proven()
    caches.start(CANDIDATE)
    caches.host.paths.compile_cache(CANDIDATE).unlink()

    def killed(_: Path, target: Path) -> bool:
        (target / "half").mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders, "copy_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            caches.start(CANDIDATE)
    assert caches.here.disk.read(CompileCache, caches.host.paths.compile_cache(CANDIDATE)) is None
    assert content(caches.start(CANDIDATE)) == ["nv", "nv/kernel"]


@pytest.mark.parametrize("broken", ["copy", "room", "record", "removal", "driver"])
def test_any_failure_starts_with_an_empty_cache(
    caches: Caches, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    caches.proven()
    caches.start(CANDIDATE)
    caches.host.paths.compile_cache(CANDIDATE).unlink()
    if broken == "copy":
        monkeypatch.setattr(folders, "copy_tree", lambda *_: False)
    if broken == "room":
        usage = type("Usage", (), {"free": 0})
        monkeypatch.setattr(compile_cache.shutil, "disk_usage", lambda _: usage)
    if broken == "record":
        caches.host.paths.compile_cache(PROVEN).unlink()
    if broken == "removal":
        monkeypatch.setattr(folders, "remove_tree", lambda _: False)
        caches.host.paths.compile_cache(PROVEN).unlink()
    if broken == "driver":
        monkeypatch.setattr(versions, "driver", lambda: "")
    new = caches.start(CANDIDATE)
    assert content(new) == []
    assert new.stat().st_uid == NOBODY.pw_uid


def test_cache_of_another_account_is_not_used(caches: Caches) -> None:
    old = caches.proven()
    os.chown(old, 12_345, 12_345)
    assert content(caches.start(CANDIDATE)) == []
    assert content(caches.start(PROVEN)) == []


def test_refuses_link_at_the_cache_folder(caches: Caches, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (caches.host.paths.root / "srv/cache").mkdir(parents=True)
    (caches.host.paths.root / "srv/cache" / KEY).symlink_to(tmp_path / "outside")
    with pytest.raises(HostToolError):
        caches.start(CANDIDATE)
    assert content(tmp_path / "outside") == []


def test_hanging_coreutils_are_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def late(*words: object, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(str(words), timeout)

    monkeypatch.setattr(subprocess, "run", late)
    assert not folders.copy_tree(tmp_path, tmp_path / "copy")


def test_missing_engine_account_is_named(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    caches.proven()

    def gone(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(container.pwd, "getpwnam", gone)
    with pytest.raises(HostToolError, match="nobody"):
        caches.start(PROVEN)
