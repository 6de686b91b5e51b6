"""Check that a host meets the plan's requirements before anything on it changes."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pyinfra import host, state
from spark_contract.machine import KEXEC_HANDOVER_KERNEL, version_key

from spark_deploy.config.errors import Problem
from spark_deploy.config.settings.host import DOCKER_DIR, GB10
from spark_deploy.hosts import capacity
from spark_deploy.hosts.capacity import Finding, Findings, error, warning
from spark_deploy.hosts.commands import is_planned, log
from spark_deploy.hosts.fabric import check_links, find_cluster_problems, read_reachability
from spark_deploy.hosts.facts import prefetch, read_fact, values_by_host
from spark_deploy.hosts.gpu import GpuState
from spark_deploy.hosts.operations import Commands, HostError, host_operation, warn
from spark_deploy.hosts.packages import REPAIRABLE
from spark_deploy.hosts.status import unit_overrides_problem
from spark_deploy.hosts.survey import HostSurvey, Survey
from spark_deploy.plan.types import PreflightPlan

_GB10_PCI_ID = "10de:2e12"
_MIN_DRIVER = "580"  # the first branch for CUDA 13


def check_survey(plan: PreflightPlan, survey: Survey) -> Findings:
    findings = (
        *_identity_findings(plan, survey),
        *_health_findings(plan, survey),
        *capacity.resource_findings(plan, survey),
    )
    return Findings(
        tuple(finding.problem for finding in findings if finding.is_error),
        tuple(finding.problem for finding in findings if not finding.is_error),
    )


def _identity_findings(plan: PreflightPlan, survey: Survey) -> Iterator[Finding]:
    """Compare the host with ``expect``.

    Stop after a wrong architecture or GPU. The GPU is recognized by its PCI id, which is readable
    even if the driver is broken.
    """
    expect = plan.expect
    identity = survey.identity
    if identity.arch != expect.arch:
        fix = "remove the host from the inventory, or set expect.arch if this machine is intended"
        yield error("architecture", f"{identity.arch or 'unknown'}, expected {expect.arch}", fix)
        return
    if expect.gpu_name == GB10 and _GB10_PCI_ID not in identity.pci:
        nvidia = ", ".join(device for device in identity.pci if device.startswith("10de:"))
        message = f"device {_GB10_PCI_ID} is missing (NVIDIA devices found: {nvidia or 'none'})"
        fix = "check `lspci`; if the GPU fell off the bus, power-cycle the host"
        yield error("PCI", message, fix)
        return
    if f"{identity.os_id} {identity.os_version}" != expect.os:
        message = f"{identity.os_name or identity.os_id or 'unknown'}, expected {expect.os}"
        fix = "install the expected system, or set expect.os if you have tested this system"
        yield error("operating system", message, fix)
    if expect.dgx_os != "ignore" and not identity.dgx_release:
        problem = Problem(
            "DGX OS",
            "/etc/dgx-release is missing",
            "install the kernel parameters and watchdog driver of DGX OS "
            "(the board otherwise resets about every 20 minutes), "
            "then set expect.dgx_os: ignore",
        )
        yield Finding(expect.dgx_os == "require", problem)
    yield from _driver_findings(plan, survey.gpu)


_DRIVER_FIX = {
    "missing": "install the driver with the DGX Dashboard or the vendor's instructions; "
    "this tool never installs or changes a driver",
    "no-driver": "reboot to load the module; if that does not help, "
    "check `dmesg | grep NVRM` and finish the vendor's update",
    "mismatch": "reboot to load the installed version, or set reboot: allow",
    "no-devices": "finish the vendor's update, then power-cycle the host",
    "error": "check `nvidia-smi` and `dmesg | grep NVRM` on the host",
}


def _driver_findings(plan: PreflightPlan, gpu: GpuState) -> Iterator[Finding]:
    if gpu.smi != "ok":
        message = gpu.smi_error.splitlines()[0] if gpu.smi_error else "nvidia-smi is not installed"
        yield error("driver", message, _DRIVER_FIX[gpu.smi])
        return
    names = [card.name for card in gpu.gpus]
    if plan.expect.gpu_name and plan.expect.gpu_name not in names:
        message = f"{', '.join(names)}, expected {plan.expect.gpu_name}"
        yield error("GPU", message, "set expect.gpu_name if this GPU is intended")
    version, module = gpu.driver_version, gpu.module_version
    if version_key(version) < version_key(_MIN_DRIVER):
        message = f"{version} is older than {_MIN_DRIVER}"
        yield error("driver", message, "update the system with the DGX Dashboard, then reboot")
    if module and module != version:
        message = f"kernel module {module} is loaded, but library {version} is installed"
        yield error("driver", message, _DRIVER_FIX["mismatch"])
    if len(gpu.driver_branches) > 1:
        message = f"driver packages from several branches: {', '.join(gpu.driver_branches)}"
        fix = "remove all driver packages except those of the preinstalled branch"
        yield error("driver", message, fix)


# While one of these is half installed, engines or installations fail.
_REQUIRED = re.compile(r"(lib)?nvidia|cuda|linux-(image|modules|nvidia)|libc6|libc-bin")
_MAX_CLOCK_DIFFERENCE_S = 300  # certificates and package lists may be "not valid yet"


def _health_findings(plan: PreflightPlan, survey: Survey) -> Iterator[Finding]:
    if not survey.sudo_works:
        message = f"{survey.user} cannot become root without a password"
        yield error("sudo", message, "run `pyinfra INVENTORY deploys/bootstrap.py` once")
    # Without root, docker never responds, so a missing response is no finding.
    if survey.docker_silent == "active" and survey.sudo_works:
        message = "docker is running but does not respond, so its containers cannot be checked"
        fix = "check `journalctl -u docker` on the host; restart docker if needed"
        yield error("docker", message, fix)
    elif survey.docker_silent not in ("", "active"):
        message = f"docker is {survey.docker_silent}, so its containers cannot be checked yet"
        fix = "no action needed: the deploy starts docker and then checks its containers"
        yield warning("docker", message, fix)
    ahead_s = survey.identity.clock_ahead_s
    if abs(ahead_s) > _MAX_CLOCK_DIFFERENCE_S:
        direction = "ahead of" if ahead_s > 0 else "behind"
        yield warning(
            "clock",
            f"the host's clock is {abs(ahead_s) / 60:,.0f} minutes {direction} this machine; "
            "package lists, certificates and keys may be rejected",
            "run `timedatectl set-ntp true` on the machine with the wrong clock",
        )
    yield from _kernel_findings(survey)
    blocks = survey.memory.blocks
    if blocks is not None and blocks.is_fragmented:
        message = f"memory is fragmented ({blocks}), but the GPU driver needs contiguous blocks"
        fix = "start an engine, which compacts memory; if the start fails, reboot the host"
        yield warning("memory", message, fix)
    if pending := survey.identity.boot.reboot_reason:
        fix = "reboot the host, or set reboot: allow to let the deploy reboot it"
        yield warning("reboot", f"pending: {pending}", fix)
    for daily in survey.daily:
        yield warning(f"daily check: {daily.where}", daily.what, daily.fix)
    if survey.gpu.torn_score and plan.expect.dgx_os != "ignore":
        package_set = survey.gpu.torn_name or "its set"
        score = f"torn score {survey.gpu.torn_score:g} relative to {package_set}"
        message = f"the vendor's update is incomplete: {score}"
        fix = "finish it with the DGX Dashboard and reboot, or set expect.dgx_os: ignore"
        is_error = plan.expect.dgx_os == "require"
        yield Finding(is_error, Problem("updates", message, fix))
    yield from _file_findings(plan, survey)
    yield from _package_findings(survey)


def _file_findings(plan: PreflightPlan, survey: Survey) -> Iterator[Finding]:
    for path in survey.read_only:
        fix = f"check `findmnt -T {path}` and `dmesg`, then run `mount -o remount,rw MOUNT`"
        yield error("disk", f"{path} is read-only", fix)
    if paths := sorted(set(survey.unit_overrides) - set(plan.expect.unit_overrides)):
        yield Finding(is_error=True, problem=unit_overrides_problem(paths))


def _package_findings(survey: Survey) -> Iterator[Finding]:
    """Report half-installed packages; new hosts have some that engines do not need."""
    fix = "run `dpkg --configure -a` and `apt-get -f install` on the host"
    broken = survey.broken_packages
    repairable = [name for name in broken if re.match(REPAIRABLE, name)]
    required = [name for name in broken if _REQUIRED.match(name) and name not in repairable]
    optional = [name for name in broken if name not in {*repairable, *required}]
    if required:
        yield error("packages", f"half installed: {', '.join(required)}", fix)
    if repairable:
        message = f"half installed: {', '.join(repairable)}"
        yield warning("packages", message, "no action needed: the deploy reinstalls these packages")
    if optional:
        message = f"half installed: {', '.join(optional)}; the engine does not need them"
        yield warning("packages", message, fix)


# Prefix of `uname -r` -> fault, kernel parameter that avoids it, source.
_FAULTY_KERNELS = {
    KEXEC_HANDOVER_KERNEL: (
        "reserves about 9 GiB, which cannot be pinned, for a kexec handover; "
        "CUDA and NCCL reportedly run out of memory",
        "kho=off",
        "NVIDIA/NV-Kernels#590; NVIDIA/open-gpu-kernel-modules#1358",
    )
}


def _kernel_findings(survey: Survey) -> Iterator[Finding]:
    memory, kernel = survey.memory, survey.identity.kernel
    if memory.cma_free_bytes > memory.cma_total_bytes:
        message = (
            f"{kernel} reserves memory for a kexec handover (CmaFree exceeds CmaTotal), "
            f"so the GPU cannot use {memory.cma_free_bytes / capacity.GIB:.1f} GiB of free memory"
        )
        yield warning("kernel", message, "boot with kho=off, or with a 6.17 kernel")
        return
    for release, (fault, parameter, source) in _FAULTY_KERNELS.items():
        if kernel.startswith(release) and parameter not in survey.identity.kernel_parameters:
            fix = f"boot with {parameter}, or with a 6.17 kernel"
            yield warning("kernel", f"{kernel} {fault} ({source})", fix)


def host_key_problems(name: str, surveys: Mapping[str, Survey]) -> Iterator[Problem]:
    key = surveys[name].identity.host_key
    others = [
        other
        for other, survey in surveys.items()
        if other != name and survey.identity.host_key == key
    ]
    if key and others:
        fix = (
            "list each machine only once; if these are different machines, run "
            "`rm /etc/ssh/ssh_host_*; ssh-keygen -A; systemctl restart ssh` on each machine, "
            "then run `ssh-keygen -R NAME` and deploys/bootstrap.py here"
        )
        yield Problem("SSH host key", f"the same key is used by {', '.join(others)}", fix)


def fact_arguments(plan: PreflightPlan) -> dict[str, Any]:
    return {
        "paths": tuple(path for path, _ in plan.disk_needed_bytes),
        "ports": plan.ports,
        "images": plan.images,
        "shared_paths": (DOCKER_DIR,),
        "look_in": plan.look_in,
    }


def read_survey(plan: PreflightPlan) -> Survey:
    # Without pyinfra's sudo, which would stop at a prompt.
    return read_fact(HostSurvey, _sudo=False, **fact_arguments(plan))


@host_operation
def check_host(plan: PreflightPlan) -> None:
    if is_planned("reboot"):
        host.noop("this host will be checked after the reboot")
        return
    survey = read_survey(plan)
    findings = check_survey(plan, survey)
    if findings.problems:
        raise HostError(*findings.problems)
    if state.is_executing:
        warn(host, *findings.warnings, *host_key_problems(host.name, values_by_host(HostSurvey)))
    prefetch()
    if survey.stubbed:
        log(f"stubbed on this host: {', '.join(survey.stubbed)}")
    host.noop("the host meets the plan's requirements")


@host_operation
def check_cluster(plan: PreflightPlan) -> None:
    if not plan.cluster:
        host.noop("this host is not part of a cluster")
        return
    links = check_links(host.name, plan.links, read_reachability(plan.links))
    problems = [*links.problems, *find_cluster_problems(plan.cluster, values_by_host(HostSurvey))]
    if problems:
        raise HostError(*problems)
    if state.is_executing:
        warn(host, *links.warnings)
    host.noop("the members can reach each other")


@host_operation
def take_over(plan: PreflightPlan) -> Commands:
    """Stop the containers in ``takeover``, and do not let docker start them again.

    To undo this: `docker update --restart=unless-stopped NAME; docker start NAME`.
    """
    competing = capacity.competing_containers(read_survey(plan).containers)
    names = [container.name for container in competing if container.name in plan.takeover]
    if not names:
        host.noop("no container needs to be stopped")
    for name in names:
        log(f"stopping container {name} (takeover)")
        quoted = shlex.quote(name)
        yield f"docker update --restart=no {quoted} && docker stop {quoted}"
