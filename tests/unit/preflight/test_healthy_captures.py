"""Whole hosts as their owners published them: what is shipped here refuses none that is healthy.

A host is put together from all that one owner showed of it, and judged by the plan of every model
with every profile of the catalog that one Spark can serve.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from spark_deploy.hosts.preflight import judge
from spark_deploy.hosts.survey import Survey
from spark_deploy.plan.types import HostPlan, NeedsPlan
from tests.unit.facts.test_facts import CAPTURES
from tests.unit.planning.plans import shipped
from tests.unit.preflight.surveyed import survey

_UNITS = {"G": 1 << 20, "T": 1 << 30, "Gi": 1 << 20, "Ti": 1 << 30}  # in KiB


def text_of(name: str) -> str:
    return (CAPTURES / name).read_text()


def kib(text: str) -> int:
    """Return the size that ``df -h`` or ``free -h`` shows."""
    number, unit = re.fullmatch(r"([\d.]+)([A-Z]i?)", text).groups()  # type: ignore[union-attr]
    return int(float(number) * _UNITS[unit])


def memory(name: str) -> dict[str, Any]:
    words = next(line for line in text_of(name).splitlines() if line.startswith("Mem:")).split()
    return {"meminfo": [f"MemTotal: {kib(words[1])} kB", f"MemAvailable: {kib(words[-1])} kB"]}


def disk(name: str) -> int:
    """Return the KiB that are free on the one filesystem of the host."""
    root = next(line.split() for line in text_of(name).splitlines() if line.endswith(" /"))
    return kib(root[3])


def table(name: str) -> dict[str, Any]:
    """Return what our own questions would have been answered where somebody typed nvidia-smi."""
    text = text_of(name)
    driver = re.search(r"Driver Version: (\S+)", text)[1]  # type: ignore[index]
    gpu = re.search(r"\d\s+(NVIDIA \S+)", text)[1]  # type: ignore[index]
    processes = re.findall(r"N/A  N/A\s+(\d+)\s+(C|G|C\+G)\s+(\S+)", text)
    module = text_of("proc-driver-nvidia-version--580.142--03.txt").replace("580.142", driver)
    return {
        "smi": [f"{gpu}, {driver}", "rc=0"],
        "module": module.splitlines(),
        "compute-apps": [f"{pid}, {path}" for pid, kind, path in processes if "C" in kind],
    }


def pci(text: str) -> dict[str, Any]:
    return {"pci": [f"10de:{device}" for device in re.findall(r"Device (?:\[10de:)?(\w{4})", text)]}


def uname(name: str) -> dict[str, Any]:
    words = text_of(name).split()
    return {"uname": [words[-2], words[2]], "kernels": [words[2]]}


SYSTEM = {"os-release": {"capture": "os-release--24.04.4--01.txt"}}
SYSFS = dict(line.split(": ") for line in text_of("sysfs--gpu-pci-ids--01.txt").splitlines())
HOSTS: dict[str, tuple[dict[str, Any], int]] = {
    "DGX OS 7.5.0 on its first day": (
        {**SYSTEM, **uname("uname--a-6.17.0-1021--01.txt"), **memory("free--h-idle--01.txt"),
         **table("nvidia-smi--table-gb10--01.txt"),
         **pci(text_of("lspci--nvidia-all-bridges--02.txt")),
         "dgx-release": {"capture": "dgx-release--ota-7.5.0--01.txt"}},
        disk("df--h-4tb--01.txt"),
    ),
    "with docker 29 and a desktop": (
        {**SYSTEM, **uname("uname--a-6.17.0-1014--03.txt"), **memory("free--h-idle-121gi--04.txt"),
         **table("nvidia-smi--table-gb10--06.txt"), "listeners": {"capture": "ss--tlnp--01.txt"}},
        disk("df--h-root-only--03.txt"),
    ),
    "of another maker, with the smaller pool": (
        {**SYSTEM, **uname("uname--a-6.17.0-1014--03.txt"), **memory("free--h-idle-119gi--03.txt"),
         "pci": [f"{SYSFS['vendor'][2:]}:{SYSFS['device'][2:]}"], "dgx-release": [],
         "smi": ["NVIDIA GB10, 580.142", "rc=0"],
         "module": {"capture": "proc-driver-nvidia-version--580.142--03.txt"}},
        disk("df--h-root-only--02.txt"),
    ),
    **{
        name: (
            {**SYSTEM, **uname("uname--a-6.14.0-1013--02.txt"), **table(name)},
            disk("df--h-root-only--02.txt"),
        )
        for name in (
            "nvidia-smi--table-gb10--02.txt", "nvidia-smi--table-gb10--03.txt",
            "nvidia-smi--table-gb10-display-on--04.txt", "nvidia-smi--table-gb10-p0--05.txt",
            "nvidia-smi--table-gb10-persistence-off--07.txt",
        )
    },
}  # fmt: skip
NEEDS = {
    f"{model} with {profile}": plan.needs
    for model, profile, plan in shipped()
    if isinstance(plan, HostPlan)
}
# Of the virtual lab: what it expects of a machine is no Spark.
PAIRS = [name for name, needs in NEEDS.items() if needs.expect.arch == "aarch64"]


def seen(host: str, needs: NeedsPlan, **sections: Any) -> Survey:
    said, free_kib = HOSTS[host]
    places = [f"{path}\t0\t/dev/nvme0n1p2\t{free_kib}\t/" for path, _ in needs.disk_needed_bytes]
    return survey(**{**said, "places": places, **sections})


@pytest.mark.parametrize("host", HOSTS)
def test_no_pair_that_is_shipped_refuses_a_healthy_host(host: str) -> None:
    assert len(PAIRS) > 20
    refused = {pair: [str(one) for one in found] for pair in PAIRS
               if (found := judge(NEEDS[pair], seen(host, NEEDS[pair])).problems)}  # fmt: skip
    assert refused == {}


@pytest.mark.parametrize("host", HOSTS)
def test_and_warns_of_nothing_but_a_system_that_is_not_dgx_os(host: str) -> None:
    found = [judge(NEEDS[pair], seen(host, NEEDS[pair])) for pair in PAIRS]
    warned = {warning.where for one in found for warning in one.warnings}
    assert warned == ({"DGX OS"} if HOSTS[host][0].get("dgx-release") == [] else set())


def test_a_host_whose_memory_another_engine_holds_is_refused_and_ours_is_not() -> None:
    needs = NEEDS["qwen3.5-122b with v2"]
    full = {"host": "DGX OS 7.5.0 on its first day", **memory("free--h-serving--02.txt")}
    [problem] = judge(needs, seen(needs=needs, **full)).problems
    assert "4.4 GiB available" in str(problem)
    ours = ["spark-serve@main-0123456789ab.service"]
    assert judge(needs, seen(needs=needs, serving=ours, **full)).problems == ()
