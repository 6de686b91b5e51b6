import os
import pwd
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
from spark_contract.records import CompileCache, Finding, Proof
from spark_contract.release import READY, parse_service
from spark_contract.tool import HostToolError
from spark_host.engine import compile_cache
from spark_host.records import boot, versions
from spark_host.system import folders
from spark_host.system.host import Host as System

NOBODY = pwd.getpwnam("nobody")
KEY, OTHER_BASE, OTHER_DRAFTS = "0123456789ab-mtp2", "ba9876543210-mtp2", "0123456789ab-mtp0"
PROVEN, CANDIDATE = f"main-{'a' * 12}", f"main-{'b' * 12}"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")


class Caches:
    def __init__(self, host):
        self.host, self.system = host, System(host.paths)
        self.reports: list[str] = []

    def release(self, name, key=KEY):
        mount = {"source": f"/srv/cache/{key}", "target": "/cache", "read_only": False}
        return self.host.release(
            name, engine__mounts=[mount], engine__user="nobody", service=parse_service(name)
        )

    def prepare(self, name, key=KEY):
        release = self.release(name, key)
        compile_cache.prepare(release, self.system, self.reports.append)
        return self.host.paths.below(str(release.cache))

    def make_proven(self, name=PROVEN, key=KEY):
        folder = self.prepare(name, key)
        boot.record_known_good(self.release(name, key), self.system)
        (folder / "nv").mkdir(exist_ok=True)
        (folder / "nv/kernel").write_text(name)
        os.chown(folder / "nv", NOBODY.pw_uid, NOBODY.pw_gid)
        return folder


@pytest.fixture
def caches(host, monkeypatch):
    monkeypatch.setattr(versions, "read_driver", lambda: "580.159.03")
    return Caches(host)


def content(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


FULL = ["nv", "nv/kernel"]


def test_candidate_writes_only_to_its_copy_of_the_cache(caches):
    old = caches.make_proven()
    new = caches.prepare(CANDIDATE)
    assert content(new) == FULL
    assert {new.stat().st_uid, (new / "nv").stat().st_uid} == {NOBODY.pw_uid}
    assert old.parent.stat().st_uid == 0
    assert (new / "nv/kernel").stat().st_ino != (old / "nv/kernel").stat().st_ino
    (new / "nv/kernel").write_text("broken")
    (new / "more").touch()
    assert (old / "nv/kernel").read_text() == PROVEN
    assert content(caches.prepare(PROVEN)) == FULL


ANSWERED, SILENT = Finding(READY, True, "", 0.0), Finding(READY, False, "", 0.0)
WRONG = Finding("arithmetic", False, "", 0.0)


@pytest.mark.parametrize(
    ("checked_run", "checks", "keeps"),
    [
        ("1", (ANSWERED, WRONG), False),
        ("1", (SILENT,), True),
        ("1", (ANSWERED, replace(WRONG, severity="warn")), True),
        ("1", (ANSWERED,), True),
        ("0", (ANSWERED, WRONG), True),
    ],
)
def test_rejected_candidate_gets_a_new_copy_of_the_cache(
    caches, monkeypatch, checked_run, checks, keeps
):
    caches.make_proven()
    monkeypatch.setenv("INVOCATION_ID", "1")
    (caches.prepare(CANDIDATE) / "nv/kernel").write_text("torn")
    digest = caches.release(CANDIDATE).digest
    result = Proof(CANDIDATE, digest, checked_run, "quick", False, "", checks, {}, {}, False, ())
    caches.system.disk.write(caches.host.paths.proof(CANDIDATE), result)
    monkeypatch.setenv("INVOCATION_ID", "2")
    assert (caches.prepare(CANDIDATE) / "nv/kernel").read_text() == ("torn" if keeps else PROVEN)


def test_cache_that_a_power_cut_may_have_damaged_is_not_used_before_it_is_proven(
    caches, tmp_path, monkeypatch
):
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("first\n")
    monkeypatch.setattr(compile_cache, "BOOT_ID", boot_id)
    caches.make_proven()
    torn = caches.prepare(CANDIDATE) / "nv/kernel"
    torn.write_text("")
    caches.prepare(CANDIDATE)
    assert torn.read_text() == ""
    boot_id.write_text("second\n")
    caches.prepare(CANDIDATE)
    assert torn.read_text() == PROVEN
    assert content(caches.prepare(PROVEN)) == FULL


def test_compile_cache_is_written_to_disk_before_its_release_is_recorded(caches, monkeypatch):
    caches.prepare(PROVEN)
    known = []

    def read_names():
        known.append(boot.read_known_good("main", caches.system).names)

    monkeypatch.setattr(boot.os, "sync", read_names)
    boot.record_known_good(caches.release(PROVEN, KEY), caches.system)
    assert known == [()]
    assert boot.read_known_good("main", caches.system).names == (PROVEN,)


@pytest.mark.parametrize(
    ("proven", "name", "key", "driver"),
    [
        (True, CANDIDATE, OTHER_BASE, "580.159.03"),
        (True, CANDIDATE, OTHER_DRAFTS, "580.159.03"),
        (True, f"embed-{'c' * 12}", KEY, "580.159.03"),
        (True, PROVEN, KEY, "590.10"),
        (True, CANDIDATE, KEY, "590.10"),
        (True, CANDIDATE, KEY, ""),
        (False, CANDIDATE, KEY, "580.159.03"),
        (False, PROVEN, KEY, "590.10"),
    ],
)
def test_incompatible_or_unproven_compile_cache_is_not_copied(
    caches, monkeypatch, proven, name, key, driver
):
    if proven:
        caches.make_proven()
    else:
        (caches.prepare(PROVEN) / "compiled").touch()
        assert content(caches.prepare(PROVEN)) == ["compiled"], "the next start continues"
    monkeypatch.setattr(versions, "read_driver", lambda: driver)
    new = caches.prepare(name, key)
    assert content(new) == []
    assert new.stat().st_uid == NOBODY.pw_uid


def test_only_starts_with_an_empty_cache_are_marked_as_compiling(caches, monkeypatch):
    def compiles(name, run):
        monkeypatch.setenv("INVOCATION_ID", run)
        caches.prepare(name)
        release = caches.release(name)
        assert not compile_cache.compiling_note(release, "another run", caches.system)
        portable = replace(release, check=replace(release.check, portable=True))
        assert not compile_cache.compiling_note(portable, run, caches.system)
        return bool(compile_cache.compiling_note(release, run, caches.system))

    assert compiles(PROVEN, "1")
    assert compiles(PROVEN, "again")
    boot.record_known_good(caches.release(PROVEN), caches.system)
    assert not compiles(PROVEN, "2")
    assert not compiles(CANDIDATE, "3")


def make_links(folder, outside):
    (folder / "file").symlink_to(outside / "secret")
    (folder / "folder").symlink_to(outside)


def make_deep(folder, _):
    parent = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 250, dir_fd=parent)
        child = os.open("d" * 250, os.O_RDONLY, dir_fd=parent)
        os.close(parent)
        parent = child
    os.close(parent)


def make_special(folder, _):
    os.mkfifo(folder / "pipe")
    (folder / "unreadable").touch(0o000)
    (folder / "\n\x1b[2J\udcff").touch()


def make_huge(folder, _):
    with (folder / "huge").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "is_copied"),
    [(make_links, True), (make_special, True), (make_deep, False), (make_huge, False)],
)
def test_hostile_cache_content_does_not_block_a_start(
    caches, tmp_path, monkeypatch, plant, is_copied
):
    monkeypatch.setattr(compile_cache, "_MAX_BYTES", 1 << 19)
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret"
    secret.write_text("root's")
    secret.chmod(0o600)
    plant(caches.make_proven(), outside)
    new = caches.prepare(CANDIDATE)
    assert bool(list(new.iterdir())) is is_copied
    assert new.stat().st_uid == NOBODY.pw_uid
    assert all(path.is_symlink() for path in new.iterdir() if path.name in ("file", "folder"))
    plant(new / "nv" if is_copied else new, outside)
    caches.prepare(CANDIDATE)
    monkeypatch.setattr(versions, "read_driver", lambda: "590.10")
    assert content(caches.prepare(CANDIDATE)) == []
    assert (secret.read_text(), secret.stat().st_uid) == ("root's", 0)
    assert content(outside) == ["secret"]
    assert folders.remove_tree(new.parent)


def test_interrupted_copy_of_the_cache_is_repeated(caches, monkeypatch):
    caches.make_proven()

    def interrupt(_, target):
        (target / "half").mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders, "copy_tree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            caches.prepare(CANDIDATE)
    state_file = caches.host.paths.compile_cache(CANDIDATE)
    assert caches.system.disk.read(CompileCache, state_file) is None
    assert content(caches.prepare(CANDIDATE)) == FULL


@pytest.mark.parametrize("failure", ["copy", "disk space", "state file", "removal"])
def test_engine_starts_with_an_empty_cache_after_any_copy_failure(caches, monkeypatch, failure):
    caches.make_proven()
    caches.prepare(CANDIDATE)
    caches.host.paths.compile_cache(CANDIDATE).unlink()
    if failure == "copy":
        monkeypatch.setattr(folders, "copy_tree", lambda *_: False)
    if failure == "disk space":
        usage = SimpleNamespace(free=0)
        monkeypatch.setattr(compile_cache.shutil, "disk_usage", lambda _: usage)
    if failure in ("state file", "removal"):
        caches.host.paths.compile_cache(PROVEN).unlink()
    if failure == "removal":
        monkeypatch.setattr(folders, "remove_tree", lambda _: False)
    new = caches.prepare(CANDIDATE)
    assert content(new) == []
    assert new.stat().st_uid == NOBODY.pw_uid


def test_cache_of_another_account_is_not_used(caches):
    old = caches.make_proven()
    os.chown(old, 12_345, 12_345)
    assert content(caches.prepare(CANDIDATE)) == []
    assert content(caches.prepare(PROVEN)) == []


def test_rejects_a_symlink_in_place_of_the_cache_folder(caches, tmp_path):
    (tmp_path / "outside").mkdir()
    (caches.host.paths.root / "srv/cache").mkdir(parents=True)
    (caches.host.paths.root / "srv/cache" / KEY).symlink_to(tmp_path / "outside")
    with pytest.raises(HostToolError):
        caches.prepare(CANDIDATE)
    assert content(tmp_path / "outside") == []


def test_hung_coreutils_commands_are_killed(monkeypatch, tmp_path):
    def hang(*words, timeout, **_):
        raise subprocess.TimeoutExpired(str(words), timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert not folders.copy_tree(tmp_path, tmp_path / "copy")


@pytest.mark.slow
def test_engine_socket_folder_is_emptied_whatever_it_contains(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    for path in (outside, folder):
        path.mkdir()
    (outside / "secret").write_text("kept")
    make_links(folder, outside)
    make_deep(folder, outside)
    (folder / "-r\n").mkdir()
    folders.remove_entries(folder)
    assert os.listdir(folder) == []
    assert (outside / "secret").read_text() == "kept"


@pytest.mark.slow
@pytest.mark.parametrize("plant", [make_huge, make_deep])
def test_proven_release_with_an_oversized_cache_starts_with_an_empty_cache(
    caches, monkeypatch, plant
):
    proven = caches.make_proven()
    release = caches.release(PROVEN)
    assert compile_cache.size_problem(release, caches.system) == ""
    plant(proven, proven)
    monkeypatch.setattr(compile_cache, "LIMIT_BYTES", 1 << 19)
    assert str(proven) in compile_cache.size_problem(release, caches.system)
    assert content(caches.prepare(PROVEN)) == []
