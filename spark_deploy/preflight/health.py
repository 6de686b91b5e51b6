"""Is the host whole: root access, finished updates, a running kernel that is the newest."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spark_deploy.errors import Problem
from spark_deploy.facts.machine.survey import Survey
from spark_deploy.planning.machine import NeedsPlan
from spark_deploy.preflight.verdict import Verdict

GIB = 1 << 30


def judge(needs: NeedsPlan, survey: Survey) -> Verdict:
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
