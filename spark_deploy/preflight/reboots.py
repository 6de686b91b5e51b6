"""Does a host wait for a reboot, and why."""

from __future__ import annotations

from spark_deploy.facts.machine.survey import Survey


def pending(survey: Survey) -> str:
    """Return why a reboot is pending, or an empty string.

    A driver whose library was upgraded under the running module is the pressing kind: the GPU is
    gone for every program that starts now.
    """
    gpu = survey.gpu
    if gpu.smi == "mismatch":
        return f"the driver's module {gpu.module_version or 'in memory'} is not the library's"
    if gpu.smi == "ok" and gpu.module_version and gpu.module_version != gpu.driver_version:
        return (
            f"driver module {gpu.module_version} is loaded, library {gpu.driver_version} is "
            "installed"
        )
    return survey.identity.reboot_pending
