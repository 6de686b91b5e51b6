"""Uninstall removes only managed resources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spark_contract.paths import Paths, kept_aside
from spark_contract.status import Before, Footprint
from spark_host.cleanup import baseline, uninstall
from spark_host.cleanup.uninstall import Others
from spark_host.system import docker, systemd

DAEMON_JSON = "/etc/docker/daemon.json"


def wanted(**more: Any) -> Footprint:
    given: dict[str, Any] = {
        "models_dir": "/srv/m", "sources_dir": "/srv/s", "cache_dir": "/srv/c",
        "files": (), "shared_files": (DAEMON_JSON,), "daemon_json": DAEMON_JSON,
        "daemon_keys": ("runtimes", "log-opts"), "masked": (), "packages": ("jq", "nginx-light"),
        "engine_packages": ("docker.io",),
        "gpu_packages": (), "docker_users": (), "access_files": (),
        "models": False, "engine": False,
    }  # fmt: skip
    return Footprint(**{**given, **more})


def was(**more: Any) -> Before:
    given: dict[str, Any] = {
        "at": "then", "packages": ("libc6",), "groups": (), "masked": (), "boot_target": "",
        "docker_members": (), "images": (), "directories": (), "files": {},
    }  # fmt: skip
    return Before(**{**given, **more})


class Apt:
    def __init__(self, *by_hand: str, **needs: tuple[str, ...]):
        self.needs = {name.replace("_", "-"): of for name, of in needs.items()}
        self.by_hand = set(by_hand)

    def output_of(self, *argv: str) -> str:
        if argv[0] == "dpkg-query":
            if argv[-1] in self.needs:
                return "10\n"
            return "".join(f"ii  {name}\n" for name in self.needs)
        if argv[0] == "apt-mark":
            return "".join(f"{name}\n" for name in argv[2:] if name in self.by_hand)
        names = [word for word in argv[argv.index("purge") + 1 :]]
        gone = self._with_those_that_need(set(names))
        if "--auto-remove" in argv:
            while more := self._unneeded(gone):
                gone |= more
        return "".join(f"Purg {name} [1]\n" for name in sorted(gone))

    def _with_those_that_need(self, gone: set[str]) -> set[str]:
        while more := {n for n, of in self.needs.items() if set(of) & gone} - gone:
            gone = gone | more
        return gone

    def _unneeded(self, gone: set[str]) -> set[str]:
        left = {n: of for n, of in self.needs.items() if n not in gone}
        needed = {one for of in left.values() for one in of}
        return {n for n in left if n not in needed and n not in self.by_hand}


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "state", lambda *words: {"ActiveState": "inactive"})


def judged(
    monkeypatch: pytest.MonkeyPatch,
    apt: Apt,
    before: Before | None,
    containers: tuple[str, ...] = (),
    **more: Any,
) -> dict[str, str]:
    monkeypatch.setattr(baseline, "output_of", apt.output_of)
    obstacles = Others(containers, (), frozenset()).obstacles(wanted())
    found = baseline.package_things(wanted(**more), before, obstacles)
    return {thing.name: thing.stays for thing in found}


HERE = {"jq": ("libjq1",), "libjq1": (), "nginx_light": (), "docker_io": ("runc",), "runc": ()}
BY_HAND = ("jq", "nginx-light", "docker.io")


def apt(**more: tuple[str, ...]) -> Apt:
    made = Apt(*BY_HAND, **{**HERE, **more})
    made.needs["docker.io"] = made.needs.pop("docker-io")
    made.needs |= {"libc6": ()}
    made.by_hand |= {"libc6"}
    return made


@pytest.mark.usefixtures("quiet")
def test_packages_are_removed_with_dependencies_except_docker(monkeypatch):
    found = judged(monkeypatch, apt(), was())
    assert {name for name, stays in found.items() if not stays} == {"jq", "libjq1", "nginx-light"}
    assert "--data uninstall.engine=true" in found["docker.io"]
    asked = judged(monkeypatch, apt(), was(), engine=True)
    assert {"docker.io", "runc"} <= {name for name, stays in asked.items() if not stays}


@pytest.mark.usefixtures("quiet")
def test_earlier_packages_are_not_listed(monkeypatch):
    found = judged(monkeypatch, apt(), was(packages=("jq", "libjq1", "libc6")))
    assert "jq" not in found
    assert "libjq1" not in found


@pytest.mark.usefixtures("quiet")
def test_packages_needed_by_the_owner_stay(monkeypatch):
    later = apt(theirs=("jq",))
    later.by_hand.add("theirs")
    found = judged(monkeypatch, later, was())
    assert found["jq"] == "theirs needs it"
    assert "libjq1" not in found
    assert "theirs" not in found


def test_running_nginx_stays(monkeypatch):
    monkeypatch.setattr(systemd, "state", lambda *words: {"UnitFileState": "enabled"})
    assert judged(monkeypatch, apt(), was())["nginx-light"] == "nginx.service is in use"


@pytest.mark.usefixtures("quiet")
def test_docker_stays_for_other_containers(monkeypatch):
    found = judged(monkeypatch, apt(), was(), containers=("db",), engine=True)
    assert found["docker.io"] == "used by containers of others: db"
    assert "runc" not in found


@pytest.mark.usefixtures("quiet")
def test_packages_stay_without_a_baseline(monkeypatch):
    found = judged(monkeypatch, apt(), None, engine=True)
    assert set(found) == {"jq", "nginx-light", "docker.io"}
    assert all(found.values())


def place(root: Path, text: str) -> Paths:
    path = root / DAEMON_JSON.lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return Paths(root)


@pytest.fixture
def no_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "is_up", lambda: False)


OURS = {"log-opts": {"max-size": "50m"}, "runtimes": {"nvidia": {}}}


@pytest.mark.usefixtures("no_docker")
def test_daemon_json_is_restored_byte_for_byte(tmp_path):
    first = '{"log-opts": {"max-size": "7m"},\n   "dns": ["1.1.1.1"]}'
    paths = place(tmp_path, json.dumps({"dns": ["1.1.1.1"], **OURS}))
    before = was(files={DAEMON_JSON: first})
    [thing] = baseline.shared_file_things(wanted(), before, "", paths)
    assert (thing.name, thing.stays) == (DAEMON_JSON, "")
    baseline.restore_shared_file(DAEMON_JSON, wanted(), before, paths)
    assert (tmp_path / DAEMON_JSON.lstrip("/")).read_text() == first
    assert baseline.shared_file_things(wanted(), before, "", paths) == []


@pytest.mark.usefixtures("no_docker")
def test_later_keys_in_daemon_json_stay(tmp_path):
    paths = place(tmp_path, json.dumps({"mtu": 9000, **OURS}))
    before = was(files={DAEMON_JSON: None})
    baseline.restore_shared_file(DAEMON_JSON, wanted(), before, paths)
    assert json.loads((tmp_path / DAEMON_JSON.lstrip("/")).read_text()) == {"mtu": 9000}
    assert baseline.shared_file_things(wanted(), before, "", paths) == []


@pytest.mark.usefixtures("no_docker")
def test_daemon_json_without_baseline_needs_a_copy(tmp_path):
    paths = place(tmp_path, json.dumps(OURS))
    [thing] = baseline.shared_file_things(wanted(), None, "", paths)
    assert "is unknown" in thing.stays
    aside = paths.below(kept_aside(wanted().daemon_json))
    aside.write_text("{}")
    assert [(t.name, t.stays) for t in baseline.shared_file_things(wanted(), None, "", paths)] == [
        (DAEMON_JSON, ""),
        (str(aside), ""),
    ]


@pytest.mark.usefixtures("quiet")
def test_baseline_is_recorded_once(tmp_path, monkeypatch):
    paths = Paths(tmp_path)
    monkeypatch.setattr(systemd, "show", lambda *words: {})
    monkeypatch.setattr(baseline, "output_of", lambda *argv: "ii  jq\n")
    assert baseline.record_baseline(wanted(), paths)
    first = baseline.read_baseline(paths)
    assert first is not None
    assert first.packages == ("jq",)
    monkeypatch.setattr(baseline, "output_of", lambda *argv: "ii  jq\nii  later\n")
    assert not baseline.record_baseline(wanted(), paths)
    assert baseline.read_baseline(paths) == first
    # A host with a state folder without a baseline.
    old = Paths(tmp_path / "old")
    old.state.mkdir(parents=True)
    assert not baseline.record_baseline(wanted(), old)
    assert baseline.read_baseline(old) is None


def test_unmanaged_folders_in_our_places_stay(tmp_path):
    for name in ("etc/spark/conf", "etc/spark/releases", "usr/local/lib/spark/jars"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "etc/systemd/system/spark-master.service").touch()
    (tmp_path / "etc/systemd/system/spark-serve@.service").touch()
    paths = Paths(tmp_path)
    found = [*uninstall._units_and_configuration(paths), *uninstall._tools(paths)]
    assert {Path(thing.name).name: thing.stays for thing in found} == {
        "conf": "not made by us",
        "releases": "",
        "jars": "not made by us",
        "spark-serve@.service": "",
    }


def test_every_state_file_is_removed(tmp_path):
    paths = Paths(tmp_path)
    of_release = (paths.proof, paths.compile_cache, paths.answers, paths.rollout, paths.request)
    of_service = (paths.rollback, paths.good, paths.stopped, paths.events)
    records = [record("main") for record in (*of_release, *of_service, paths.job)]
    for path in (*records, paths.gpu_receipt, paths.daily):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert [thing.name for thing in uninstall._records(paths) if thing.stays] == []
    (paths.state / "theirs").touch()
    assert [Path(thing.name).name for thing in uninstall._records(paths) if thing.stays] == [
        "theirs"
    ]


def test_vanished_folder_is_no_failure(tmp_path):
    names = [str(tmp_path / name) for name in ("gone", "there")]
    Path(names[1]).mkdir()
    going = [uninstall.Thing("directory", name) for name in names]
    assert uninstall._remove_round(going, wanted(), Paths(tmp_path)) == []
    assert not Path(names[1]).exists()
