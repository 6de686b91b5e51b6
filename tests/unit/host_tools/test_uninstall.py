import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prune_machine import add_generations
from spark_contract.paths import Paths, backup_path
from spark_contract.records import GpuProof
from spark_contract.status import NETPLAN_FILE, REMOVED_NETPLAN, Baseline, Footprint, ManagedItem
from spark_contract.tool import HostToolError
from spark_host.cleanup import baseline, uninstall
from spark_host.cleanup.uninstall import UnmanagedContainers
from spark_host.system import docker, systemd
from spark_host.system.host import write_document
from stub_host import write_program

DAEMON_JSON = "/etc/docker/daemon.json"
OUR_SETTINGS = {"log-opts": {"max-size": "50m"}, "runtimes": {"nvidia": {}}}


def footprint(**changes):
    values: dict[str, Any] = {
        "models_dir": "/srv/m", "sources_dir": "/srv/s", "cache_dir": "/srv/c",
        "files": (), "shared_files": (DAEMON_JSON,), "daemon_json": DAEMON_JSON,
        "daemon_keys": ("runtimes", "log-opts"), "masked": (), "packages": ("jq", "nginx-light"),
        "engine_packages": ("docker.io",), "gpu_packages": (), "docker_users": (),
        "access_files": (), "models": False, "engine": False,
    }  # fmt: skip
    return Footprint(**{**values, **changes})


def earlier_host(**changes):
    values: dict[str, Any] = {
        "at": "then", "packages": ("libc6",), "groups": (), "masked": (), "boot_target": "",
        "docker_members": (), "images": (), "directories": (), "files": {},
    }  # fmt: skip
    return Baseline(**{**values, **changes})


class Apt:
    def __init__(self):
        self.needs: dict[str, tuple[str, ...]] = {
            "jq": ("libjq1",), "libjq1": (), "nginx-light": (), "docker.io": ("runc",),
            "runc": (), "libc6": (),
        }  # fmt: skip
        self.manual = {"jq", "nginx-light", "docker.io", "libc6"}

    def output_of(self, *argv):
        if argv[0] == "dpkg-query":
            if argv[-1] in self.needs:
                return "10\n"
            return "".join(f"ii  {name}\n" for name in self.needs)
        if argv[0] == "apt-cache":
            return "".join(f"{name}\n  Depends: x\n" for name in self._with_dependencies(argv))
        if argv[0] == "apt-mark":
            return "".join(f"{name}\n" for name in argv[2:] if name in self.manual)
        purged = self._with_dependents(set(argv[argv.index("purge") + 1 :]))
        if "--auto-remove" in argv:
            while unneeded := self._unneeded(purged):
                purged |= unneeded
        return "".join(f"Purg {name} [1]\n" for name in sorted(purged))

    def _with_dependencies(self, names):
        names = set(names) & self.needs.keys()
        while more := {need for name in names for need in self.needs[name]} - names:
            names |= more
        return names

    def _with_dependents(self, purged):
        while more := {name for name, needs in self.needs.items() if purged & set(needs)} - purged:
            purged = purged | more
        return purged

    def _unneeded(self, purged):
        left = set(self.needs) - purged
        needed = {package for name in left for package in self.needs[name]}
        return left - needed - self.manual


@pytest.fixture
def apt(monkeypatch):
    apt = Apt()
    monkeypatch.setattr(baseline, "_read_output", apt.output_of)
    monkeypatch.setattr(systemd, "state", lambda *words: {"ActiveState": "inactive"})
    return apt


def reasons_to_stay(before, containers=(), **changes):
    keep_reasons = UnmanagedContainers(containers, (), frozenset()).keep_reasons(footprint())
    things = baseline.package_items(footprint(**changes), before, keep_reasons)
    return {thing.name: thing.kept_because for thing in things}


@pytest.mark.usefixtures("apt")
def test_removes_packages_and_their_dependencies_except_docker():
    packages = reasons_to_stay(earlier_host())
    removed = {name for name, stays in packages.items() if not stays}
    assert removed == {"jq", "libjq1", "nginx-light"}
    assert "--data uninstall.engine=true" in packages["docker.io"]
    with_engine = reasons_to_stay(earlier_host(), engine=True)
    assert {"docker.io", "runc"} <= {name for name, stays in with_engine.items() if not stays}


@pytest.mark.usefixtures("apt")
def test_does_not_list_packages_that_were_already_installed():
    packages = reasons_to_stay(earlier_host(packages=("jq", "libjq1", "libc6")))
    assert packages.keys().isdisjoint({"jq", "libjq1"})


def test_uninstall_keeps_packages_that_the_owner_needs(apt):
    apt.needs["theirs"] = ("jq",)
    apt.manual.add("theirs")
    packages = reasons_to_stay(earlier_host())
    assert packages["jq"] == "needed by theirs"
    assert packages.keys().isdisjoint({"libjq1", "theirs"})


def test_uninstall_keeps_unneeded_packages_of_others(apt):
    apt.needs["linux-image-6.17.0-1014-nvidia"] = ()  # from an update after the first deploy
    assert reasons_to_stay(earlier_host()).keys() == {"jq", "libjq1", "nginx-light", "docker.io"}


def test_uninstall_keeps_a_running_nginx(apt, monkeypatch):
    monkeypatch.setattr(systemd, "state", lambda *words: {"UnitFileState": "enabled"})
    assert reasons_to_stay(earlier_host())["nginx-light"] == "nginx.service is in use"


@pytest.mark.usefixtures("apt")
def test_uninstall_keeps_docker_if_other_containers_exist():
    same = UnmanagedContainers(("db",), (), frozenset())
    assert same.keep_reasons(footprint(gpu_packages=("docker.io",)))["docker.io"].endswith(": db")
    packages = reasons_to_stay(earlier_host(), containers=("db",), engine=True)
    assert packages["docker.io"] == "used by unmanaged containers: db"
    assert "runc" not in packages


@pytest.mark.usefixtures("apt")
def test_uninstall_keeps_packages_if_the_baseline_is_missing():
    packages = reasons_to_stay(None, engine=True)
    assert set(packages) == {"jq", "nginx-light", "docker.io"}
    assert all(packages.values())


@pytest.fixture
def write_daemon_json(tmp_path, monkeypatch):
    monkeypatch.setattr(docker, "is_up", lambda: False)

    def write(**settings):
        path = tmp_path / DAEMON_JSON.lstrip("/")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**settings, **OUR_SETTINGS}))
        return path

    return write


def changed_files(before, root):
    return baseline.changed_shared_files(footprint(), before, "", Paths(root))


@pytest.mark.parametrize(
    ("earlier", "current", "restored"),
    [
        ('{"log-opts": {"max-size": "7m"},\n   "dns": ["1.1.1.1"]}', {"dns": ["1.1.1.1"]}, None),
        (None, {"mtu": 9000}, {"mtu": 9000}),
    ],
    ids=["byte for byte", "later keys"],
)
def test_uninstall_restores_daemon_json(tmp_path, write_daemon_json, earlier, current, restored):
    path, before = write_daemon_json(**current), earlier_host(files={DAEMON_JSON: earlier})
    assert [(t.name, t.kept_because) for t in changed_files(before, tmp_path)] == [
        (DAEMON_JSON, "")
    ]
    baseline.restore_shared_file(DAEMON_JSON, footprint(), before, Paths(tmp_path))
    if restored is None:
        assert path.read_text() == earlier
    else:
        assert json.loads(path.read_text()) == restored
    assert changed_files(before, tmp_path) == []


def test_daemon_json_is_restored_only_from_a_copy_if_the_baseline_is_missing(
    tmp_path, write_daemon_json
):
    write_daemon_json()
    [thing] = changed_files(None, tmp_path)
    assert "is unknown" in thing.kept_because
    copy = Paths(tmp_path).below(backup_path(DAEMON_JSON))
    copy.write_text("{}")
    things = [(thing.name, thing.kept_because) for thing in changed_files(None, tmp_path)]
    assert things == [(DAEMON_JSON, ""), (str(copy), "")]


@pytest.mark.usefixtures("apt")
def test_baseline_is_recorded_once(tmp_path, monkeypatch):
    paths = Paths(tmp_path)
    monkeypatch.setattr(systemd, "show", lambda *words: {})
    monkeypatch.setattr(baseline, "_read_output", lambda *argv: "ii  jq\n")
    assert baseline.record_baseline(footprint(), paths)
    first = baseline.read_baseline(paths)
    assert first.packages == ("jq",)
    monkeypatch.setattr(baseline, "_read_output", lambda *argv: "ii  jq\nii  later\n")
    assert not baseline.record_baseline(footprint(), paths)
    assert baseline.read_baseline(paths) == first
    old = Paths(tmp_path / "old")
    old.state.mkdir(parents=True)
    assert not baseline.record_baseline(footprint(), old)
    assert baseline.read_baseline(old) is None


def test_unreadable_package_list_does_not_count_as_a_host_without_packages(tmp_path, monkeypatch):
    paths = Paths(tmp_path)
    program = write_program(tmp_path / "bin/dpkg-query", "echo 'parsing file' >&2; exit 2")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    with pytest.raises(HostToolError, match="parsing file"):
        baseline.record_baseline(footprint(), paths)
    assert baseline.read_baseline(paths) is None
    with pytest.raises(HostToolError, match="parsing file"):
        list(baseline.package_leftovers(earlier_host(), paths))


def test_uninstall_keeps_unmanaged_files_in_managed_folders(tmp_path):
    for name in ("etc/spark/conf", "etc/spark/releases", "usr/local/lib/spark/jars"):
        (tmp_path / name).mkdir(parents=True)
    for unit in ("spark-master.service", "spark-serve@.service"):
        (tmp_path / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
        (tmp_path / "etc/systemd/system" / unit).touch()
    paths = Paths(tmp_path)
    things = [*uninstall._units_and_configuration(paths), *uninstall._tools_and_records(paths)]
    assert {Path(thing.name).name: thing.kept_because for thing in things} == {
        "conf": "not created by this project",
        "releases": "",
        "jars": "not created by this project",
        "spark-serve@.service": "",
    }


def test_uninstall_removes_every_state_file(tmp_path):
    paths = Paths(tmp_path)
    of_release = (paths.proof, paths.compile_cache, paths.answers, paths.rollout, paths.request)
    of_service = (paths.rollback, paths.known_good, paths.stopped, paths.events)
    files = [path_of("main") for path_of in (*of_release, *of_service, paths.job)]
    removed_network = paths.below(REMOVED_NETPLAN)
    for path in (*files, paths.gpu_receipt, paths.daily, removed_network, paths.state / "theirs"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert names_that_stay(paths) == ["theirs"]


def test_uninstall_removes_request_bodies_that_a_killed_gateway_left(tmp_path):
    paths = Paths(tmp_path)
    folder = paths.gateway_bodies("main")
    (folder / "body").mkdir(parents=True)
    things = [Path(thing.name) for thing in uninstall._tools_and_records(paths)]
    assert any(path in (folder, *folder.parents) for path in things)


def test_uninstall_keeps_network_state_while_addresses_are_set(tmp_path):
    paths = Paths(tmp_path)
    for path in (paths.below(NETPLAN_FILE), paths.state / "fabric/record.json"):
        path.parent.mkdir(parents=True)
        path.touch()
    assert names_that_stay(paths) == ["fabric"]


def names_that_stay(paths):
    things = uninstall._tools_and_records(paths)
    return [Path(thing.name).name for thing in things if thing.kept_because]


@pytest.mark.parametrize(
    "name", ["quantizer", "quantizer-{}", "site", "site-{}", "{}", ".{}.pruned", "{}.new"]
)
def test_removes_every_version_of_the_tools(tmp_path, name):
    (tmp_path / "usr/local/lib/spark" / name.format("0123456789ab")).mkdir(parents=True)
    assert [thing.kept_because for thing in uninstall._tools_and_records(Paths(tmp_path))] == [""]


def test_uninstall_accepts_a_missing_folder(tmp_path):
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    things = [ManagedItem("directory", str(path)) for path in (missing, empty)]
    assert uninstall._remove_round(things, footprint(), Paths(tmp_path)) == []
    assert not empty.exists()


def test_manifest_lists_every_managed_item(machine, monkeypatch):
    add_generations(machine)
    unmanaged = machine.folder("models", "my-finetune")
    earlier = machine.paths.root / f"srv/earlier/model-{'e' * 12}"
    earlier.mkdir(parents=True)
    proof = {"receipt": f"{machine.on_host(earlier)}/receipt.json", "digest": "e" * 64}
    machine.job("e" * 12, proof)
    machine.image("spark-vllm:two", "l1", size=10)
    absent = subprocess.CompletedProcess((), 127, "", "")
    monkeypatch.setattr(docker, "client", lambda *words, **_: absent)
    monkeypatch.setattr(systemd, "list_units", lambda pattern: [])
    monkeypatch.setattr(baseline, "_read_output", lambda *argv: "")
    folders = {f"{kind}_dir": f"/srv/{kind}" for kind in ("models", "sources", "cache")}
    things = uninstall.read_manifest(footprint(**folders), machine.paths).items
    by_kind: dict[str, set[str]] = {}
    for thing in things:
        by_kind.setdefault(thing.kind, set()).add(Path(thing.name).name)
    assert by_kind["tree"] == {f"model-{letter * 12}" for letter in "abcde"}
    assert by_kind["source"] == {"org--old-aaaaaaaaaaaa", "org--new-bbbbbbbbbbbb"}
    assert by_kind["image"] == {"spark-vllm:one", "spark-vllm:two"}
    assert {"releases", "gateway"} <= by_kind["configuration"]
    assert {"jobs", "good"} <= by_kind["record"]
    assert [Path(thing.name) for thing in things if thing.kind == "other"] == [unmanaged]


def test_manifest_lists_the_image_of_the_gpu_check(machine, monkeypatch):
    reference = "registry/cuda@sha256:" + "c" * 64
    machine.image(reference, "l1", size=10, label=None)
    proof = GpuProof(key={"image": reference}, docker_arguments=(), gpu="x")
    write_document(machine.paths.gpu_receipt, proof)
    nothing = UnmanagedContainers((), (), frozenset())
    assert [t.name for t in uninstall._image_items(None, nothing, machine.paths)] == [reference]
    machine.images[reference]["RepoTags"] = ["cuda:mine"]
    assert list(uninstall._image_items(None, nothing, machine.paths)) == []

    def silent(reference):
        raise docker.DockerTimeoutError("docker", "did not answer", "run again")

    monkeypatch.setattr(docker, "inspect_image", silent)
    with pytest.raises(docker.DockerTimeoutError):
        list(uninstall._image_items(None, nothing, machine.paths))
