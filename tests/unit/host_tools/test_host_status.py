import json
import subprocess
import sys
from pathlib import Path

import pytest
from spark_contract import documents
from spark_contract.paths import Paths
from spark_contract.records import KnownGoodReleases, RollbackRecord, Rollout
from spark_contract.status import RunningRollout
from spark_contract.units import GATEWAY, SERVE, SWITCH
from spark_host import status
from spark_host.check import runner
from spark_host.engine import logs
from spark_host.status import unit_overrides
from spark_host.system import docker, systemd
from spark_host.system import host as system
from spark_host.system.host import record_event
from stub_host import RELEASE

from spark_deploy.hosts.status import Evidence as Fact
from spark_deploy.hosts.status import Status

OTHER = "main-ffffffffffff"


@pytest.fixture
def read_status(host, monkeypatch):
    def read(**unit):
        states = {"ActiveState": "active", "InvocationID": "run-1", "NRestarts": "2", **unit}
        known = system.release_names(host.paths)
        units = [template.unit(name) for template in (SERVE, SWITCH) for name in known]

        def loaded(_, properties):
            unit = {name: states[name] for name in properties if name in states}
            return dict.fromkeys([*units, GATEWAY.unit("main")], unit)

        monkeypatch.setattr(systemd, "show_loaded", loaded)
        document = documents.to_plain(status.main([], host.paths))
        return Status().process([json.dumps(document)])

    return read


def test_status_of_a_host_without_releases_is_readable(read_status):
    host_status = read_status()
    assert host_status.report.releases == ()
    assert (host_status.report.services, host_status.report.live) == ({}, None)
    assert host_status.report.memory.total_bytes > host_status.report.memory.available_bytes > 0


def test_status_reports_when_a_release_is_proven_or_unproven(host, read_status):
    release = host.release()
    never = read_status().release(RELEASE)
    assert (never.active, never.restarts, never.proof) == ("active", 2, None)
    assert never.unproven == "never checked"

    host.started(release)
    runner.check(release, host.here, "full", print, invocation_id="run-1")
    proven = read_status().release(RELEASE)
    assert (proven.proof.release, proven.proof.level, proven.unproven) == (RELEASE, "full", None)
    assert read_status(InvocationID="run-2").release(RELEASE).unproven == (
        "the engine has been restarted since the last check"
    )
    assert read_status(ActiveState="failed").release(RELEASE).unproven == "not running"


def test_status_of_a_release_reports_its_interrupted_rollout(host, read_status):
    host.release()
    assert not read_status().has_failed_change(RELEASE)
    assert read_status(ActiveState="failed").has_failed_change(RELEASE)
    assert not read_status(ActiveState="failed").has_failed_change(OTHER)


def test_status_reports_a_running_rollout(host, read_status):
    host.release()
    here = host.here
    record = Rollout(RELEASE, "then", invocation_id="run-1", state="running", phase="start")
    here.disk.write(here.paths.rollout(RELEASE), record)
    assert read_status(ActiveState="activating").rollout("main") == RunningRollout(
        RELEASE, "then", "start"
    )
    assert read_status(ActiveState="inactive", Job="7").rollout("main").phase == "start"
    assert read_status(ActiveState="inactive", Job="0").rollout("main") is None


def test_status_reports_rollback_and_events_of_a_service(host, read_status):
    release, here = host.release(), host.here
    here.disk.write(here.paths.known_good("main"), KnownGoodReleases(RELEASE, (OTHER,), "then"))
    here.disk.write(here.paths.rollback("main"), RollbackRecord("done", OTHER, RELEASE, "then"))
    record_event(release, "hot", "the GPU is at 91 °C", host.paths)
    host_status = read_status()
    main = host_status.service("main")
    assert (main.known_good, main.active, main.traffic_open) == (RELEASE, RELEASE, False)
    assert (main.rolled_back.from_release, main.rolled_back.to) == (OTHER, RELEASE)
    [event] = host_status.report.events["main"]
    assert (event.release, event.kind, event.text) == (RELEASE, "hot", "the GPU is at 91 °C")
    assert json.loads(host.paths.events("main").read_text()) == {
        "at": event.at, "release": RELEASE, "kind": "hot", "text": "the GPU is at 91 °C",
    }  # fmt: skip


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", bytes(9), b'{"at": "then"}', b"{"])
def test_damaged_events_hide_neither_the_status_nor_other_events(host, read_status, damage):
    release = host.release()
    record_event(release, "hot", "the GPU is at 91 °C", host.paths)
    path = host.paths.events("main")
    path.write_bytes(path.read_bytes() + damage + b"\n")
    record_event(release, "cooled", "the GPU has cooled", host.paths)
    events = read_status().report.events["main"]
    assert [event.kind for event in events] == ["hot", "cooled"]


ETC = "/etc/systemd/system"
OURS = (
    f"{ETC}/spark-serve@.service",
    f"{ETC}/spark-daily.timer",
    f"{ETC}/spark-on-request.service",
    f"{ETC}/spark-hours@main-0123456789ab.timer",
    f"{ETC}/spark-serve@main-0123456789ab.service.d/50-release.conf",
    f"{ETC}/spark-serve@main-0123456789ab.service.d/50-cluster.conf",
    f"{ETC}/spark-watch@main-0123456789ab.service.d/50-cluster.conf",
    f"{ETC}/spark-job@0123456789ab.service.d/order.conf",
    f"{ETC}/run-spark-engines-main.mount",
    f"{ETC}/spark-prepare@main-0123456789ab.target.d/0123456789ab.conf",
)
FOREIGN = (
    f"{ETC}/ssh.service.d/50-spark.conf",
    f"{ETC}/spark-master.service.d/override.conf",
    f"{ETC}/spark-worker.service",
    f"{ETC}/spark-serve@.service.d/README",  # systemd reads only *.conf
    f"{ETC}/spark-serve@.service.d/spark-serve@a.service",
    f"{ETC}/multi-user.target.wants/spark-serve@main-0123456789ab.service",
    "/usr/lib/systemd/system/service.d/10-timeout.conf",
    "/usr/lib/systemd/system/run-rpc_pipefs.mount",
    f"{ETC}/home.mount.d/a.conf",
)


def write(root, *files):
    for file in files:
        path = root / file.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[Service]\nExecStartPost=\n")


@pytest.mark.parametrize(
    "file",
    [
        f"{ETC}/spark-serve@.service.d/override.conf",
        f"{ETC}/spark-serve@.service.d/50-release.conf",
        f"{ETC}/spark-serve@main-0123456789ab.service.d/override.conf",
        f"{ETC}/spark-serve@main-0123456789ab.service",
        f"{ETC}/spark-.service.d/a.conf",
        f"{ETC}/spark-@.service.d/a.conf",
        f"{ETC}/spark-@main-0123456789ab.service.d/a.conf",
        f"{ETC}/service.d/a.conf",
        f"{ETC}/spark-daily.timer.d/a.conf",
        f"{ETC}/spark-on-request.service.d/override.conf",
        f"{ETC}/spark-on-.service.d/a.conf",
        f"{ETC}/run-spark-engines-main.mount.d/x.conf",
        f"{ETC}/run-spark-.mount.d/x.conf",
        f"{ETC}/mount.d/x.conf",
        "/usr/lib/systemd/system/run-spark-engines-main.mount.d/x.conf",
        r"/run/systemd/system/run-spark-engines-my\x2dservice.mount",
        "/etc/systemd/system.control/spark-serve@main-0123456789ab.service.d/50-MemoryMax.conf",
        "/run/systemd/system.control/spark-gateway@main.service.d/50-CPUQuota.conf",
        "/run/systemd/system/spark-watch@.service.d/a.conf",
        "/usr/lib/systemd/system/spark-serve@.service.d/a.conf",
        "/run/systemd/transient/spark-serve@x.service",
    ],
)
def test_lists_files_that_override_managed_units(tmp_path, file):
    write(tmp_path, *OURS, *FOREIGN, file)
    assert unit_overrides(Paths(tmp_path)) == (file,)


@pytest.mark.parametrize(
    "name",
    [
        "spark-serve@main-0123456789ab.service",
        "spark-watch@.service",
        "spark-on-request.service",
    ],
)
def test_lists_masked_units(tmp_path, name):
    write(tmp_path, *(file for file in OURS if not file.endswith(name)))
    (tmp_path / ETC.lstrip("/") / name).symlink_to("/dev/null")
    assert unit_overrides(Paths(tmp_path)) == (f"{ETC}/{name}",)


def test_host_without_managed_units_has_no_overrides(tmp_path):
    assert unit_overrides(Paths(tmp_path)) == ()


def test_lists_managed_drop_in_replaced_by_a_link(tmp_path):
    write(tmp_path, *OURS)
    path = tmp_path / OURS[4].lstrip("/")
    path.unlink()
    path.symlink_to("/dev/null")
    assert unit_overrides(Paths(tmp_path)) == (OURS[4],)


@pytest.mark.parametrize("name", ["service.d", "spark-serve@.service.d"])
def test_lists_a_drop_in_directory_that_is_a_link(tmp_path, name):
    write(tmp_path, *OURS, "/tmp/d/a.conf")
    (tmp_path / ETC.lstrip("/") / name).symlink_to(tmp_path / "tmp/d")
    assert unit_overrides(Paths(tmp_path)) == (f"{ETC}/{name}",)


# Messages as vLLM 0.33 prints them; the prefixes are of captured logs.
LOG = (Path(__file__).parents[2] / "fixtures/engine-start.log").read_text()
GIB = 1 << 30


def test_reads_kernels_times_and_sizes_from_the_start_log():
    messages = list(logs.startup_messages(LOG.splitlines()))
    lines = logs.kernel_lines(messages)
    assert [line.split()[1] for line in lines] == [
        "Triton/FLA", "CutlassFp8BlockScaledMMKernel", "FlashInferCutlassNvFp4LinearKernel",
        "all", "is",
    ]  # fmt: skip
    assert lines[-1].endswith("setting cudagraph_mode=PIECEWISE")
    assert "CANARY" not in "".join(lines)
    assert logs.times_s(messages) == {
        "weights": 410.0, "load": 420.5, "graphs": 22.0, "init": 55.5,
    }  # fmt: skip
    assert logs.sizes_bytes(messages) == {
        "model": int(75.5 * GIB), "kv_cache": int(18.5 * GIB), "graphs": GIB // 2,
    }  # fmt: skip
    assert logs.kv_cache_tokens(messages) == 652_465


def test_evidence_lists_library_versions_loaded_by_the_engine(tmp_path):
    packages = tmp_path / "lib/python3.12/dist-packages"
    for name in ("flashinfer_python-0.7.2.post1", "torch-2.14.0+cu130", "requests-2.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    library = packages / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.write_bytes(bytes(9000) + b"NCCL version 2.29.3+cuda13.0\0" + bytes(9000))
    code = f"import mmap, sys; f = open({str(library)!r}); m = mmap.mmap(f.fileno(), 0, prot=1)"
    waiting = f"{code}; print('mapped', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "mapped\n"
        for pid, group in ((child.pid, "0::/docker-c0ffee.scope"), (1, "0::/init.scope")):
            process = tmp_path / f"proc/{pid}"
            process.mkdir(parents=True)
            (process / "cgroup").write_text(f"{group}\n")
            (process / "maps").symlink_to(f"/proc/{child.pid}/maps")
            (process / "root").symlink_to("/")
        libraries = status.read_container_libraries("c0ffee", tmp_path / "proc")
        other = status.read_container_libraries("c1c1c1", tmp_path / "proc")
        child.stdin.close()
    assert (libraries["nccl"], libraries["flashinfer"], libraries["torch"]) == (
        "2.29.3", "0.7.2.post1", "2.14.0+cu130",
    )  # fmt: skip
    assert "requests" not in libraries
    assert other == {}


@pytest.fixture
def read_evidence(host, monkeypatch):
    states = {"ActiveState": "active", "InvocationID": "run-1"}
    monkeypatch.setattr(systemd, "show", lambda units, _: dict.fromkeys(units, states))
    monkeypatch.setattr(docker, "inspect_container", lambda *_: None)

    def read():
        document = documents.to_plain(status.read_evidence(host.paths))
        result = Fact().process([json.dumps(document)])
        assert result is not None
        return result

    return read


def test_evidence_of_a_host_without_release_is_empty(read_evidence):
    result = read_evidence()
    assert (result.engines, result.gpu_container) == ((), ())


def test_evidence_includes_the_rollout_if_the_engine_log_is_missing(host, read_evidence):
    host.serving()
    host.here.disk.write(
        host.paths.rollout(RELEASE),
        Rollout(RELEASE, state="switched", log_tail=("CANARY",), times_s={"total": 9.5}),
    )
    [engine] = read_evidence().engines
    assert engine.release == RELEASE
    assert engine.generated_tokens == 0
    assert (engine.rollout_state, engine.rollout_times_s) == ("switched", {"total": 9.5})
    assert "CANARY" not in repr(engine)


def test_firmware_evidence_excludes_serial_numbers(host):
    folder = host.paths.root / "sys/class/dmi/id"
    folder.mkdir(parents=True)
    for name, text in {
        "product_name": "NVIDIA DGX Spark\n", "bios_version": "5.36_0ACUM018\n",
        "product_serial": "1234567890123\n", "product_uuid": "0\n", "sys_vendor": "\x00odd\n",
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    assert status.read_firmware(host.paths.root) == {
        "product_name": "NVIDIA DGX Spark", "bios_version": "5.36_0ACUM018",
    }  # fmt: skip


def test_tools_too_old_for_the_evidence_command_give_no_evidence():
    assert Fact().process(["spark-host status [--live]: everything"]) is None
    assert Fact().process([]) is None
