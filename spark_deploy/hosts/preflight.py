"""Refuse an unfit host before anything is changed on it."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pyinfra import host, state
from spark_contract.machine import version_key

from spark_deploy.config.errors import Problem
from spark_deploy.config.settings.host import DOCKER_DIR, GB10
from spark_deploy.hosts import capacity
from spark_deploy.hosts.commands import is_predicted, log
from spark_deploy.hosts.fabric import find_differences, judge_links, read_reachability
from spark_deploy.hosts.facts import prefetch, read_fact, values_by_host
from spark_deploy.hosts.gpu import GpuState
from spark_deploy.hosts.operations import Commands, Refused, host_operation, warn
from spark_deploy.hosts.packages import REPAIRABLE
from spark_deploy.hosts.status import unit_overrides_problem
from spark_deploy.hosts.survey import HostSurvey, Survey
from spark_deploy.plan.types import NeedsPlan

_Finding = tuple[bool, Problem]  # whether it refuses the host
_GB10_PCI_ID = "10de:2e12"
_OLDEST_DRIVER = "580"  # the first for CUDA 13


def _error(where: str, message: str, fix: str) -> _Finding:
    return True, Problem(where, message, fix)


def _warning(where: str, message: str, fix: str) -> _Finding:
    return False, Problem(where, message, fix)


def judge(needs: NeedsPlan, survey: Survey) -> capacity.Verdict:
    findings = (*_identity_findings(needs, survey), *_health_findings(needs, survey))
    workloads = capacity.judge_workloads(needs, survey)
    room = capacity.judge_capacity(needs, survey)
    problems = (problem for refuses, problem in findings if refuses)
    warnings = (problem for refuses, problem in findings if not refuses)
    return capacity.Verdict(
        (*problems, *workloads.problems, *room.problems),
        (*warnings, *workloads.warnings, *room.warnings),
    )


def _identity_findings(needs: NeedsPlan, survey: Survey) -> Iterator[_Finding]:
    """Compare the host with ``expect:``.

    Basic checks come first: the PCI id is readable while the driver is broken.
    """
    expect = needs.expect
    identity = survey.identity
    if identity.arch != expect.arch:
        fix = "take this host out of the inventory, or set expect.arch for another machine"
        yield _error("architecture", f"{identity.arch or 'unknown'}, expected {expect.arch}", fix)
        return
    if expect.gpu_name == GB10 and _GB10_PCI_ID not in identity.pci:
        nvidia = ", ".join(device for device in identity.pci if device.startswith("10de:"))
        yield _error(
            "PCI",
            f"no device {_GB10_PCI_ID} (NVIDIA devices found: {nvidia or 'none'})",
            "check the board; if the GPU fell off the bus (`lspci`), power-cycle the host",
        )
        return
    if f"{identity.os_id} {identity.os_version}" != expect.os:
        message = f"{identity.os_name or identity.os_id or 'unknown'}, expected {expect.os}"
        fix = "install that release, or set expect.os if this one works"
        yield _error("operating system", message, fix)
    if expect.dgx_os != "ignore" and not identity.dgx_release:
        problem = Problem(
            "DGX OS",
            "/etc/dgx-release is missing",
            "plain Ubuntu needs kernel parameters and a watchdog driver of DGX OS, or the board "
            "resets about every 20 minutes; set expect.dgx_os: ignore when you have them",
        )
        yield expect.dgx_os == "require", problem
    yield from _driver_findings(needs, survey.gpu)


_DRIVER_FIX = {
    "missing": "install the driver with the DGX Dashboard or the vendor's instructions; "
    "this tool never installs or changes a driver",
    "no-driver": "reboot to load the module; if that does not help, check `dmesg | grep NVRM` and "
    "finish the vendor's update",
    "mismatch": "reboot to load the installed version, or set reboot: allow",
    "no-devices": "finish the vendor's update and power-cycle: the driver does not reach the GPU",
    "error": "check `nvidia-smi` and `dmesg | grep NVRM` on the host",
}


def _driver_findings(needs: NeedsPlan, gpu: GpuState) -> Iterator[_Finding]:
    if gpu.smi != "ok":
        message = gpu.smi_error.splitlines()[0] if gpu.smi_error else "nvidia-smi is not installed"
        yield _error("driver", message, _DRIVER_FIX[gpu.smi])
        return
    names = [card.name for card in gpu.gpus]
    if needs.expect.gpu_name and needs.expect.gpu_name not in names:
        message = f"{', '.join(names)}, expected {needs.expect.gpu_name}"
        yield _error("GPU", message, "set expect.gpu_name")
    version, module = gpu.driver_version, gpu.module_version
    if version_key(version) < version_key(_OLDEST_DRIVER):
        message = f"{version} is older than {_OLDEST_DRIVER}"
        yield _error("driver", message, "update the whole set with the DGX Dashboard, then reboot")
    if module and module != version:
        message = f"module {module} is loaded, library {version} is installed"
        yield _error("driver", message, _DRIVER_FIX["mismatch"])
    if len(gpu.driver_branches) > 1:
        message = f"packages of several branches are installed: {', '.join(gpu.driver_branches)}"
        yield _error("driver", message, "remove the packages of all branches but the factory's")


# Engines or installations fail while any of these is half installed.
_REQUIRED = re.compile(r"(lib)?nvidia|cuda|linux-(image|modules|nvidia)|libc6|libc-bin")
_CLOCK_S = 300  # above, package lists and certificates may be "not valid yet"


def _health_findings(needs: NeedsPlan, survey: Survey) -> Iterator[_Finding]:
    if not survey.sudo_works:
        message = f"{survey.user} cannot become root without a password"
        yield _error("sudo", message, "run `pyinfra INVENTORY deploys/bootstrap.py` once")
    if survey.docker_silent == "active" and survey.sudo_works:  # without root docker never answers
        message = "the daemon runs but does not answer, so unmanaged containers are unknown"
        fix = "check `journalctl -u docker` on the host; restart docker if needed"
        yield _error("docker", message, fix)
    elif survey.docker_silent not in ("", "active"):
        message = f"its unit is {survey.docker_silent}; unmanaged containers are not known yet"
        fix = "no action needed: the deploy starts it and checks them then"
        yield _warning("docker", message, fix)
    ahead_s = survey.identity.clock_ahead_s
    if abs(ahead_s) > _CLOCK_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        yield _warning(
            "clock",
            f"{abs(ahead_s) / 60:,.0f} minutes {side} this machine's: package lists, certificates "
            "and keys may be refused",
            "run `timedatectl set-ntp true` on the machine with the wrong clock",
        )
    yield from ((False, problem) for problem in _kernel_problems(survey))
    blocks = survey.memory.blocks
    if blocks is not None and blocks.is_fragmented:
        message = f"fragmented: {blocks}; the GPU driver needs contiguous blocks"
        fix = "a start compacts it; if the start fails, reboot the host"
        yield _warning("memory", message, fix)
    if pending := survey.identity.boot.reboot_reason:
        fix = "reboot the host, or set reboot: allow to have the deploy do it"
        yield _warning("reboot", f"pending: {pending}", fix)
    for daily in survey.daily:
        yield _warning(f"daily check: {daily.where}", daily.what, daily.fix)
    if survey.gpu.torn_score and needs.expect.dgx_os != "ignore":
        score = f"torn score {survey.gpu.torn_score:g} against {survey.gpu.torn_name or 'its set'}"
        message = f"the vendor's update is incomplete: {score}"
        fix = "finish it with the DGX Dashboard or apt full-upgrade, reboot; or set expect.dgx_os"
        yield needs.expect.dgx_os == "require", Problem("updates", message, fix)
    yield from _file_findings(needs, survey)
    yield from _package_findings(survey)


def _file_findings(needs: NeedsPlan, survey: Survey) -> Iterator[_Finding]:
    for path in survey.read_only:
        fix = f"check why: findmnt -T {path}; dmesg; after a repair: mount -o remount,rw MOUNT"
        yield _error("disk", f"{path} is read-only", fix)
    if paths := sorted(set(survey.unit_overrides) - set(needs.expect.unit_overrides)):
        yield True, unit_overrides_problem(paths)


def _package_findings(survey: Survey) -> Iterator[_Finding]:
    """Hosts are delivered with half-installed packages that no engine needs."""
    fix = "run `dpkg --configure -a` and `apt-get -f install` on the host"
    broken = survey.broken_packages
    repairable = [name for name in broken if re.match(REPAIRABLE, name)]
    required = [name for name in broken if _REQUIRED.match(name) and name not in repairable]
    optional = [name for name in broken if name not in {*repairable, *required}]
    if required:
        yield _error("packages", f"half installed: {', '.join(required)}", fix)
    if repairable:
        message = f"half installed: {', '.join(repairable)}"
        yield _warning("packages", message, "no action needed: the deploy installs them again")
    if optional:
        message = f"half installed: {', '.join(optional)}; the engine does not need them"
        yield _warning("packages", message, fix)


# Faulty kernels by the start of `uname -r`: fault, kernel parameter, source.
_FAULTY_KERNELS = {
    "7.0.0-1019-": (
        "keeps about 9 GiB for a kexec handover, where pinning fails: CUDA and NCCL "
        "are reported to run out of memory",
        "kho=off",
        "NVIDIA/NV-Kernels#590; NVIDIA/open-gpu-kernel-modules#1358",
    )
}


def _kernel_problems(survey: Survey) -> Iterator[Problem]:
    memory, kernel = survey.memory, survey.identity.kernel
    if memory.cma_free_bytes > memory.cma_total_bytes:
        yield Problem(
            "kernel",
            f"{kernel} counts {memory.cma_free_bytes / capacity.GIB:.1f} GiB as free that "
            "the GPU cannot have (CmaFree is above CmaTotal in /proc/meminfo: kexec handover)",
            "boot with kho=off, or with a 6.17 kernel",
        )
        return
    for release, (fault, parameter, source) in _FAULTY_KERNELS.items():
        if kernel.startswith(release) and parameter not in survey.identity.kernel_parameters:
            fix = f"boot with {parameter}, or with a 6.17 kernel"
            yield Problem("kernel", f"{kernel} {fault} ({source})", fix)


def same_host_key(surveys: Mapping[str, Survey]) -> dict[str, Problem]:
    """Warn of hosts with the SSH host key of another host, such as cloned disks.

    The key of each can impersonate all.
    """
    by_key: dict[str, list[str]] = {}
    for name, survey in surveys.items():
        if survey.identity.host_key:
            by_key.setdefault(survey.identity.host_key, []).append(name)
    return {
        name: Problem(
            "SSH host key",
            f"is also that of {', '.join(other for other in names if other != name)}",
            "list it once, if it is the same machine; or give each host a new key: "
            "`rm /etc/ssh/ssh_host_*; ssh-keygen -A; systemctl restart ssh` on the host, then "
            "`ssh-keygen -R` the name here and run deploys/bootstrap.py",
        )
        for names in by_key.values()
        for name in names
        if len(names) > 1
    }


def fact_arguments(needs: NeedsPlan) -> dict[str, Any]:
    return {
        "paths": tuple(path for path, _ in needs.disk_needed_bytes),
        "ports_wanted": needs.ports,
        "images": needs.images,
        "shared_paths": (DOCKER_DIR,),
        "look_in": needs.look_in,
    }


def read_survey(needs: NeedsPlan) -> Survey:
    # Without pyinfra's sudo, which would stop at a prompt.
    return read_fact(HostSurvey, _sudo=False, **fact_arguments(needs))


@host_operation
def check_host(needs: NeedsPlan) -> None:
    if is_predicted("reboot"):
        host.noop("checked after the reboot")
        return
    survey = read_survey(needs)
    verdict = judge(needs, survey)
    if verdict.problems:
        raise Refused(*verdict.problems)
    if state.is_executing:
        same_key = same_host_key(values_by_host(HostSurvey))
        warn(host, *verdict.warnings, *(p for name, p in same_key.items() if name == host.name))
    prefetch()
    if survey.stubbed:
        log(f"stubbed on this host: {', '.join(survey.stubbed)}")
    host.noop("the host fits the plan")


@host_operation
def check_cluster(needs: NeedsPlan) -> None:
    if not needs.cluster:
        host.noop("not part of a cluster")
        return
    verdict = judge_links(host.name, needs.links, read_reachability(needs.links))
    problems = [*verdict.problems, *find_differences(needs.cluster, values_by_host(HostSurvey))]
    if problems:
        raise Refused(*problems)
    if state.is_executing:
        warn(host, *verdict.warnings)
    host.noop("the members reach each other")


@host_operation
def take_over(needs: NeedsPlan) -> Commands:
    """Stop containers of ``takeover``, and keep docker from starting them.

    To revert: `docker update --restart=unless-stopped NAME; docker start NAME`.
    """
    competing = capacity.competing_containers(read_survey(needs).containers)
    names = [container.name for container in competing if container.name in needs.takeover]
    if not names:
        host.noop("no container to take over")
    for name in names:
        log(f"stopping container {name} (takeover)")
        quoted = shlex.quote(name)
        yield f"docker update --restart=no {quoted} && docker stop {quoted}"
