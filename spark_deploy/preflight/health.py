"""Is the host whole: root access, finished updates, a running kernel that is the newest."""

from __future__ import annotations

from collections.abc import Iterator

from spark_deploy.errors import Problem
from spark_deploy.facts.machine.survey import Survey
from spark_deploy.planning.types import NeedsPlan
from spark_deploy.preflight.verdict import Verdict


def judge(needs: NeedsPlan, survey: Survey) -> Verdict:
    """Look for half-done updates and missing rights."""
    return Verdict(tuple(_problems(survey)), tuple(_warnings(survey)))


def _problems(survey: Survey) -> Iterator[Problem]:
    if not survey.sudo_works:
        yield Problem(
            "sudo",
            f"{survey.user} cannot become root without a password",
            "run `pyinfra INVENTORY deploys/bootstrap.py` once",
        )
    if survey.broken_packages:
        yield Problem(
            "packages",
            f"half installed: {', '.join(survey.broken_packages)}",
            "run `dpkg --configure -a` and `apt-get -f install` on the host",
        )
    if survey.gpu.torn_score:
        yield Problem(
            "updates",
            f"the vendor's update is torn: {survey.gpu.torn_score} packages differ from "
            f"{survey.gpu.torn_name or 'the set'}",
            "finish it with the DGX Dashboard (or apt full-upgrade) and reboot",
        )
    if survey.docker_silent == "active":
        yield Problem(
            "docker",
            "its daemon runs but does not answer, so containers of others cannot be told",
            "see `journalctl -u docker` on the host; a restart of docker may be needed",
        )


def _warnings(survey: Survey) -> Iterator[Problem]:
    if survey.docker_silent not in ("", "active"):
        yield Problem(
            "docker",
            f"its unit is {survey.docker_silent}; containers of others cannot be told yet",
            "nothing to do: it is started, and looked at again then",
        )
    if survey.identity.reboot_pending:
        yield Problem(
            "reboot",
            f"pending: {survey.identity.reboot_pending}",
            "reboot when it suits you, or set reboot: allow to have the deploy do it",
        )


def pending_reboot(survey: Survey) -> str:
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
