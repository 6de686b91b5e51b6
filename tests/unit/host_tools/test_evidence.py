import json
import subprocess
import sys
from pathlib import Path

import pytest
from spark_contract import documents
from spark_contract.records import Rollout
from spark_host import status
from spark_host.engine import logs
from spark_host.system import docker, systemd
from stub_host import RELEASE

from spark_deploy.hosts.status import Evidence as Fact

# Messages as vLLM 0.33 prints them; the prefixes are of captured logs.
LOG = (Path(__file__).parents[2] / "fixtures/engine-start.log").read_text()
GIB = 1 << 30


def test_start_log_yields_kernels_times_and_sizes():
    messages = list(logs.start_messages(LOG.splitlines()))
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


def test_reports_mapped_libraries(tmp_path):
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


def test_evidence_without_a_release(read_evidence):
    result = read_evidence()
    assert (result.engines, result.gpu_container) == ((), ())


def test_evidence_includes_rollout_of_a_running_engine_without_log(host, read_evidence):
    release = host.release()
    host.started(release)
    host.here.disk.write(
        host.paths.rollout(RELEASE),
        Rollout(RELEASE, state="switched", log_tail=("CANARY",), times_s={"total": 9.5}),
    )
    [engine] = read_evidence().engines
    assert engine.release == RELEASE
    assert engine.generated_tokens == 0
    assert (engine.rollout_state, engine.rollout_times_s) == ("switched", {"total": 9.5})
    assert "CANARY" not in repr(engine)


def test_firmware_excludes_serial_numbers(host):
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
