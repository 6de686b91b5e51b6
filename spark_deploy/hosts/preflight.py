"""Refuse a host that does not fit, before anything is changed on it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pyinfra.api.operation import operation
from pyinfra.context import host, state
from spark_contract.machine import version_key

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.capacity import (
    GIB,
    Verdict,
    competing_containers,
    judge_capacity,
    judge_workloads,
)
from spark_deploy.hosts.commands import is_predicted, log
from spark_deploy.hosts.fabric import find_differences, judge_links
from spark_deploy.hosts.facts import answers_by_host, prefetch, read_fact
from spark_deploy.hosts.gpu import GpuState
from spark_deploy.hosts.host_errors import Commands, Refused, host_errors, show
from spark_deploy.hosts.network import Reach
from spark_deploy.hosts.survey import HostSurvey, Survey
from spark_deploy.plan.machine import NeedsPlan


def judge_health(needs: NeedsPlan, survey: Survey) -> Verdict:
    """Look for half-done updates and missing rights."""
    problems, warnings = [*_problems(survey)], [*_warnings(survey)]
    warnings += [Problem(f"daily look: {one.where}", one.what, one.fix) for one in survey.daily]
    if survey.gpu.torn_score and needs.updates != "ignore":
        (problems if needs.updates == "require" else warnings).append(_torn(survey))
    for names, serious in _half_installed(survey):
        (problems if serious else warnings).append(names)
    return Verdict(tuple(problems), tuple(warnings))


# Half of one of these is a host whose engine may not start, or whose installations fail.
_NEEDED = re.compile(
    r"docker|containerd|runc|(lib)?nvidia|cuda|linux-(image|modules|nvidia)|libc6|libc-bin|nginx"
)


def _half_installed(survey: Survey) -> Iterator[tuple[Problem, bool]]:
    """Yield the half-installed packages that an engine stands on, and apart from them the others.

    Hosts are delivered with half-installed language packs; they serve all the same.
    """
    fix = "run `dpkg --configure -a` and `apt-get -f install` on the host"
    needed = [name for name in survey.broken_packages if _NEEDED.match(name)]
    others = [name for name in survey.broken_packages if name not in needed]
    if needed:
        yield Problem("packages", f"half installed: {', '.join(needed)}", fix), True
    if others:
        what = f"half installed: {', '.join(others)}; the engine does not need them"
        yield Problem("packages", what, fix), False


def _torn(survey: Survey) -> Problem:
    return Problem(
        "updates",
        f"the vendor's update is not whole: torn score {survey.gpu.torn_score:g} against "
        f"{survey.gpu.torn_name or 'its set'}",
        "finish it with the DGX Dashboard (or apt full-upgrade) and reboot; expect.updates says "
        "what it means here",
    )


def _problems(survey: Survey) -> Iterator[Problem]:
    if not survey.sudo_works:
        yield Problem(
            "sudo",
            f"{survey.user} cannot become root without a password",
            "run `pyinfra INVENTORY deploys/bootstrap.py` once",
        )
    if survey.docker_silent == "active" and survey.sudo_works:  # else it may not be asked
        yield Problem(
            "docker",
            "its daemon runs but does not answer, so containers of others cannot be told",
            "see `journalctl -u docker` on the host; a restart of docker may be needed",
        )


# Minutes away, archives' lists and certificates begin to be "not valid yet".
_CLOCK_S = 300


def _warnings(survey: Survey) -> Iterator[Problem]:
    ahead_s = survey.identity.clock_ahead_s
    if abs(ahead_s) > _CLOCK_S:
        away = f"{abs(ahead_s) / 60:,.0f} minutes {'ahead of' if ahead_s > 0 else 'behind'}"
        yield Problem(
            "clock",
            f"{away} this machine's: package lists, certificates and keys may be refused",
            "see `timedatectl` on the side that is wrong; `timedatectl set-ntp true` sets it right",
        )
    if survey.docker_silent not in ("", "active"):
        yield Problem(
            "docker",
            f"its unit is {survey.docker_silent}; containers of others cannot be told yet",
            "nothing to do: it is started, and looked at again then",
        )
    yield from _kernel(survey)
    blocks = survey.memory.blocks
    if blocks is not None and blocks.is_fragmented:
        yield Problem(
            "memory",
            f"fragmented: {blocks}; the GPU driver needs contiguous blocks",
            "a start compacts it; if the start fails, reboot the host",
        )
    if survey.identity.boot.pending:
        yield Problem(
            "reboot",
            f"pending: {survey.identity.boot.pending}",
            "reboot when it suits you, or set reboot: allow to have the deploy do it",
        )


# Kernels with a reported fault, by the beginning of `uname -r`: the fault, the kernel parameter
# that avoids it, and the source.
_FAULTY_KERNELS = {
    "7.0.0-1019-": (
        "keeps about 9 GiB for its kexec handover, where nothing can be pinned: CUDA and NCCL "
        "are reported to run out of memory",
        "kho=off",
        "NVIDIA/NV-Kernels#590; NVIDIA/open-gpu-kernel-modules#1358",
    ),
}


def _kernel(survey: Survey) -> Iterator[Problem]:
    memory, kernel = survey.memory, survey.identity.kernel
    if memory.cma_free_bytes > memory.cma_total_bytes:
        yield Problem(
            "kernel",
            f"{kernel} counts {memory.cma_free_bytes / GIB:.1f} GiB as free that "
            "the GPU cannot have (CmaFree is above CmaTotal in /proc/meminfo: kexec handover)",
            "boot with kho=off, or with a 6.17 kernel, to have them back",
        )
        return
    for release, (fault, parameter, source) in _FAULTY_KERNELS.items():
        if kernel.startswith(release) and parameter not in survey.identity.kernel_parameters:
            fix = f"boot with {parameter}, or with a 6.17 kernel"
            yield Problem("kernel", f"{kernel} {fault} ({source})", fix)


# In this order because each survives what breaks the next: the PCI id is there while the driver
# is dead, and a dead driver on the right board is trouble with the driver, not a wrong host.
def judge_identity(needs: NeedsPlan, survey: Survey) -> Verdict:
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


def judge(needs: NeedsPlan, survey: Survey) -> Verdict:
    """Collect everything that is wrong with a host at once."""
    judges = (judge_identity, judge_health, judge_workloads, judge_capacity)
    verdicts = [judge_part(needs, survey) for judge_part in judges]
    return Verdict(
        tuple(problem for verdict in verdicts for problem in verdict.problems),
        tuple(warning for verdict in verdicts for warning in verdict.warnings),
    )


def same_host_key(surveys: Mapping[str, Survey]) -> dict[str, Problem]:
    """Return a warning for each host that shows the SSH host key of another one.

    Hosts cloned from one disk do: whoever holds the key of one can pass for all of them.
    """
    by_key: dict[str, list[str]] = {}
    for name, survey in surveys.items():
        if survey.identity.host_key:
            by_key.setdefault(survey.identity.host_key, []).append(name)
    return {
        name: Problem(
            "SSH host key",
            f"is also that of {', '.join(other for other in names if other != name)}",
            "list it once, if it is one machine; else give each its own: "
            "`rm /etc/ssh/ssh_host_*; ssh-keygen -A; systemctl restart ssh` on it, then "
            "`ssh-keygen -R` its name here and run deploys/bootstrap.py",
        )
        for names in by_key.values()
        for name in names
        if len(names) > 1
    }


def fact_arguments(needs: NeedsPlan) -> dict[str, Any]:
    """Build the arguments of the survey."""
    return {
        "paths": tuple(path for path, _ in needs.disk_needed_bytes),
        "ports_wanted": needs.ports,
        "images": needs.images,
        "shared_paths": (needs.docker_dir,),
        "look_in": needs.look_in,
    }


def read_survey(needs: NeedsPlan) -> Survey:
    """Look at the host once for all operations of preflight."""
    # The survey finds its own way to root; with pyinfra's sudo it would stop at a prompt.
    return read_fact(HostSurvey, _sudo=False, **fact_arguments(needs))


@operation()
@host_errors
def check_host(needs: NeedsPlan) -> None:
    """Let the run go on only on a host that fits ``needs``; show all that is wrong at once."""
    if is_predicted("reboot"):
        host.noop("judged after the reboot")
        return
    survey = read_survey(needs)
    verdict = judge(needs, survey)
    if verdict.problems:
        raise Refused(*verdict.problems)
    if state.is_executing:
        twins = same_host_key(answers_by_host(HostSurvey))
        for warning in (*verdict.warnings, *(p for name, p in twins.items() if name == host.name)):
            show(host, f"warning: {warning}", colour="yellow")
    prefetch()
    if survey.stubbed:
        log(f"stubbed on this host: {', '.join(survey.stubbed)}")
    host.noop("the host fits the plan")


@operation()
@host_errors
def check_cluster(needs: NeedsPlan) -> None:
    """Let the run go on only where the members of a cluster reach each other and are alike."""
    if not needs.cluster:
        host.noop("serves by itself")
        return
    asked = tuple((way.interface, way.address, way.mtu) for way in needs.ways)
    reached: dict[str, str] = read_fact(Reach, _sudo=False, ways=asked)
    verdict = judge_links(host.name, needs.ways, reached)
    problems = [*verdict.problems, *find_differences(needs.cluster, answers_by_host(HostSurvey))]
    if problems:
        raise Refused(*problems)
    for warning in verdict.warnings if state.is_executing else ():
        show(host, f"warning: {warning}", colour="yellow")
    host.noop("the members reach each other")


@operation()
@host_errors
def take_over(needs: NeedsPlan) -> Commands:
    """Stop the engine containers of ``takeover`` and keep docker from starting them again.

    They are not removed: `docker update --restart=unless-stopped NAME; docker start NAME` brings
    one back.
    """
    names = [
        c.name
        for c in competing_containers(read_survey(needs).containers)
        if c.name in needs.takeover
    ]
    if not names:
        host.noop("no container to take over")
        return
    for name in names:
        log(f"stopping container {name} (takeover)")
        quoted = shlex.quote(name)
        yield f"docker update --restart=no {quoted} && docker stop {quoted}"
