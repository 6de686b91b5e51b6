"""Recorded output of real GB10 hosts passes preflight.

A capture replaces a section of a factory Spark. Hosts assembled from everything that an owner
published are judged by the plan of every shipped model and profile.
"""

import re
from typing import Any

import pytest
from spark_host.engine import logs

from spark_deploy.hosts.gpu import CudaState, Toolkit
from spark_deploy.hosts.preflight import check_survey
from spark_deploy.plan.types import HostPlan
from tests.unit.facts.test_facts import CAPTURES
from tests.unit.planning.plans import shipped
from tests.unit.preflight.surveyed import survey
from tests.unit.shell import install_stub, run_script

MODULES = {
    "580.142": "proc-driver-nvidia-version--580.142--03.txt",
    "580.126.09": "proc-driver-nvidia-version--580.126.09--01.txt",
}
UNIT = "spark-serve@main-0123456789ab.service"
KIB = {"G": 1 << 20, "T": 1 << 30, "Gi": 1 << 20, "Ti": 1 << 30}


def read(name):
    return (CAPTURES / name).read_text()


def uname(name):
    words = read(name).split()
    return {"uname": [words[-2], words[2]], "kernels": [words[2]]}


def smi_table(name):
    text = read(name)
    driver = re.search(r"Driver Version: (\S+)", text)[1]
    gpu = re.search(r"\d\s+(NVIDIA \S+)", text)[1]
    processes = re.findall(r"N/A  N/A\s+(\d+)\s+(C|G|C\+G)\s+(\S+)", text)
    return {
        "smi": [f"{gpu}, {driver}", "rc=0"],
        "module": read(MODULES["580.142"]).replace("580.142", driver).splitlines(),
        "compute-apps": [f"{pid}, {path}" for pid, kind, path in processes if "C" in kind],
    }


def kib(text):
    number, unit = re.fullmatch(r"([\d.]+)([A-Z]i?)", text).groups()
    return int(float(number) * KIB[unit])


def memory(name):
    words = next(line for line in read(name).splitlines() if line.startswith("Mem:")).split()
    return {"meminfo": [f"MemTotal: {kib(words[1])} kB", f"MemAvailable: {kib(words[-1])} kB"]}


def free_kib(name):
    root = next(line.split() for line in read(name).splitlines() if line.endswith(" /"))
    return kib(root[3])


def pci_names(name):
    devices = re.findall(r"Device (?:\[10de:)?(\w{4})", read(name))
    return {"pci": [f"10de:{device}" for device in devices]}


SYSTEM = {"os-release": {"capture": "os-release--24.04.4--01.txt"}}
SYSFS = dict(line.split(": ") for line in read("sysfs--gpu-pci-ids--01.txt").splitlines())
FIRST_DAY = "DGX OS 7.5.0 on its first day"
HOSTS: dict[str, tuple[dict[str, Any], int]] = {
    FIRST_DAY: (
        {**SYSTEM, **uname("uname--a-6.17.0-1021--01.txt"), **memory("free--h-idle--01.txt"),
         **smi_table("nvidia-smi--table-gb10--01.txt"),
         **pci_names("lspci--nvidia-all-bridges--02.txt"),
         "dgx-release": {"capture": "dgx-release--ota-7.5.0--01.txt"}},
        free_kib("df--h-4tb--01.txt"),
    ),
    "docker 29 and a desktop": (
        {**SYSTEM, **uname("uname--a-6.17.0-1014--03.txt"), **memory("free--h-idle-121gi--04.txt"),
         **smi_table("nvidia-smi--table-gb10--06.txt"),
         "listeners": {"capture": "ss--tlnp--01.txt"}},
        free_kib("df--h-root-only--03.txt"),
    ),
    "another maker, smaller pool": (
        {**SYSTEM, **uname("uname--a-6.17.0-1014--03.txt"), **memory("free--h-idle-119gi--03.txt"),
         "pci": [f"{SYSFS['vendor'][2:]}:{SYSFS['device'][2:]}"], "dgx-release": [],
         "smi": ["NVIDIA GB10, 580.142", "rc=0"], "module": {"capture": MODULES["580.142"]}},
        free_kib("df--h-root-only--02.txt"),
    ),
    **{
        name: (
            {**SYSTEM, **uname("uname--a-6.14.0-1013--02.txt"), **smi_table(name)},
            free_kib("df--h-root-only--02.txt"),
        )
        for name in (
            "nvidia-smi--table-gb10--02.txt", "nvidia-smi--table-gb10--03.txt",
            "nvidia-smi--table-gb10-display-on--04.txt", "nvidia-smi--table-gb10-p0--05.txt",
            "nvidia-smi--table-gb10-persistence-off--07.txt",
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def all_needs():
    return {
        f"{model} with {profile}": plan.preflight
        for model, profile, plan in shipped()
        if isinstance(plan, HostPlan) and plan.preflight.expect.arch == "aarch64"
    }


def host_survey(host, needs, **changes):
    sections, available_kib = HOSTS[host]
    fields = f"\t0\t/dev/nvme0n1p2\t{available_kib}\t/"
    usage = [f"{path}{fields}" for path, _ in needs.disk_needed_bytes]
    return survey(**{**sections, "paths": usage, **changes})


@pytest.mark.parametrize(
    "host",
    [pytest.param(host, marks=pytest.mark.slow) if "--table-" in host else host for host in HOSTS],
)
def test_healthy_host_passes_for_every_shipped_model_and_profile(host, all_needs):
    assert len(all_needs) > 20
    verdicts = {
        pair: check_survey(needs, host_survey(host, needs)) for pair, needs in all_needs.items()
    }
    refused = {pair: verdict.problems for pair, verdict in verdicts.items() if verdict.problems}
    assert refused == {}
    warned = {warning.where for verdict in verdicts.values() for warning in verdict.warnings}
    assert warned == ({"DGX OS"} if HOSTS[host][0].get("dgx-release") == [] else set())


def test_rejects_memory_used_by_another_engine_but_not_by_ours(all_needs):
    needs = all_needs["qwen3.5-122b with v2"]
    full = memory("free--h-serving--02.txt")
    [problem] = check_survey(needs, host_survey(FIRST_DAY, needs, **full)).problems
    assert "4.4 GiB available" in str(problem)
    assert check_survey(needs, host_survey(FIRST_DAY, needs, serving=[UNIT], **full)).problems == ()


KERNEL_FAULTS = {
    "journalctl--nvrm-no-memory--01.txt": {"no_memory": 1},
    "journalctl--nvrm-no-memory-three-lines--02.txt": {"no_memory": 3},
    "journalctl--xid-119-gsp-timeout--01.txt": {"xid": 2},
    "journalctl--xid-13-illegal-instruction--02.txt": {"xid": 1},
    "journalctl--xid-79-with-prefix--03.txt": {"xid": 1},
    "dmesg--oom-kill-container--02.txt": {"oom_kills": 1},
}


@pytest.mark.parametrize("name", KERNEL_FAULTS)
def test_counts_faults_in_kernel_logs(name):
    none = {"xid": 0, "no_memory": 0, "oom_kills": 0}
    assert logs.parse_kernel_faults(read(name)) == {**none, **KERNEL_FAULTS[name]}


def startup_messages(name):
    return list(logs.startup_messages(read(name).splitlines()))


def test_reads_kv_cache_and_kernels_from_engine_logs():
    one_spark = startup_messages("vllm-log--kv-cache-one-spark-qwen3.6-35b--03.txt")
    assert logs.kv_cache_tokens(one_spark) == 1_253_392
    assert logs.sizes_bytes(one_spark)["kv_cache"] == int(52.66 * (1 << 30))
    assert logs.times_s(one_spark)["profile"] == 2.55
    assert [line for line in logs.kernel_lines(one_spark) if "cudagraph_mode=PIECEWISE" in line]
    two_sparks = startup_messages("vllm-log--kv-cache-fixed-bytes-two-sparks--01.txt")
    assert logs.kv_cache_tokens(two_sparks) == 652_465
    assert logs.kernel_lines(two_sparks) == ()
    kernels = logs.kernel_lines(startup_messages("vllm-log--kernel-selection-nvfp4--01.txt"))
    assert [line.split()[1] for line in kernels] == [
        "FlashInferCutlassNvFp4LinearKernel", "CutlassFP8ScaledMMLinearKernel",
    ]  # fmt: skip
    complete = startup_messages("vllm-log--startup-complete--01.txt")
    assert not [line for line in complete if "127.0.0.1" in line]


def test_finds_a_toolkit_by_its_compiler(tmp_path):
    nvcc = tmp_path / "bin"
    nvcc.mkdir()
    install_stub(nvcc, "nvcc", f"cat {CAPTURES}/nvcc--version--02.txt")
    toolkits = CudaState().process(run_script(CudaState().command(), nvcc)).toolkits
    assert Toolkit(str(tmp_path), "13.0.88") in toolkits
