"""Is this the machine the plan was made for: architecture, then PCI, then system, then driver.

In this order because each survives what breaks the next: the PCI id is there while the driver is
dead, and a dead driver on the right board is trouble with the driver, not a wrong host.
"""

from __future__ import annotations

from collections.abc import Iterator

from spark_contract.host.machine import version_key

from spark_deploy.errors import Problem
from spark_deploy.facts.machine.gpu import GpuState
from spark_deploy.facts.machine.survey import Survey
from spark_deploy.planning.machine import NeedsPlan
from spark_deploy.preflight.verdict import Verdict


def judge(needs: NeedsPlan, survey: Survey) -> Verdict:
    """Compare the host with ``expect:``."""
    seen = survey.identity
    if seen.arch != needs.arch:
        return Verdict(
            (
                Problem(
                    "architecture",
                    f"{seen.arch or 'unknown'}, expected {needs.arch}",
                    "take this host out of the inventory, or set expect.arch for another machine",
                ),
            )
        )
    if needs.pci_ids and not set(seen.pci) & set(needs.pci_ids):
        return Verdict((_no_gpu(needs, survey),))
    return Verdict(
        tuple([*_system(needs, survey), *_driver(needs, survey.gpu)]),
        tuple(_release(needs, survey)),
    )


def _no_gpu(needs: NeedsPlan, survey: Survey) -> Problem:
    found = [device for device in survey.identity.pci if device.startswith("10de:")]
    return Problem(
        "PCI",
        f"no device {' or '.join(needs.pci_ids)} "
        f"(NVIDIA devices found: {', '.join(found) or 'none'})",
        "not the expected board, or its GPU fell off the bus: power-cycle, look at lspci",
    )


def _system(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    seen = survey.identity
    if (seen.os_id, seen.os_version) != (needs.os_id, needs.os_version):
        yield Problem(
            "operating system",
            f"{seen.os_name or seen.os_id or 'unknown'}, expected {needs.os_id} {needs.os_version}",
            "install that release, or set expect.os_id and expect.os_version if you know it works",
        )
    if needs.dgx_release == "require" and not seen.dgx_release:
        yield Problem("DGX OS", "/etc/dgx-release is missing", _PLAIN_UBUNTU_FIX)


_PLAIN_UBUNTU_FIX = (
    "plain Ubuntu needs kernel parameters and a watchdog driver of DGX OS, else the board "
    "resets about every 20 minutes; set expect.dgx_release: ignore when you have them"
)


def _release(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    if needs.dgx_release == "warn" and not survey.identity.dgx_release:
        yield Problem("DGX OS", "/etc/dgx-release is missing", _PLAIN_UBUNTU_FIX)


_DRIVER_FIX = {
    "missing": "install the driver with the DGX Dashboard or the vendor's instructions; "
    "this tool never installs or changes one",
    "no-driver": "the module is not loaded: reboot; if that does not help, see `dmesg | grep NVRM` "
    "and finish the vendor's update",
    "mismatch": "the running module and the installed library differ: reboot, or set "
    "reboot: allow to have the deploy do it",
    "no-devices": "the driver does not reach the GPU (half an update, or GSP trouble): finish the "
    "vendor's update and power-cycle",
    "error": "see `nvidia-smi` and `dmesg | grep NVRM` on the host",
}


def _driver(needs: NeedsPlan, gpu: GpuState) -> Iterator[Problem]:
    if gpu.smi != "ok":
        says = gpu.smi_says.splitlines()[0] if gpu.smi_says else "nvidia-smi is not installed"
        yield Problem("driver", says, _DRIVER_FIX[gpu.smi])
        return
    if needs.gpu_name and needs.gpu_name not in {found.name for found in gpu.gpus}:
        names = ", ".join(found.name for found in gpu.gpus)
        yield Problem("GPU", f"{names}, expected {needs.gpu_name}", "set expect.gpu_name")
    if version_key(gpu.driver_version) < version_key(needs.driver_min):
        yield Problem(
            "driver",
            f"{gpu.driver_version} is older than {needs.driver_min}",
            "update with the DGX Dashboard (the whole set, then reboot)",
        )
    if gpu.module_version and gpu.module_version != gpu.driver_version:
        yield Problem(
            "driver",
            f"module {gpu.module_version} is loaded, library {gpu.driver_version} is installed",
            _DRIVER_FIX["mismatch"],
        )
    if len(gpu.driver_branches) > 1:
        yield Problem(
            "driver",
            f"packages of several branches are installed: {', '.join(gpu.driver_branches)}",
            "remove all but the factory branch",
        )
