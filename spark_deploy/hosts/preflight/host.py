"""Is there room: disk on each filesystem we write to, root's alone, and memory for the engine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from spark_contract.machine import version_key

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.facts.gpu import GpuState
from spark_deploy.hosts.facts.survey import Survey
from spark_deploy.hosts.preflight.verdict import Verdict
from spark_deploy.plan.machine import NeedsPlan
from spark_deploy.plan.memory import START_MARGIN

GIB = 1 << 30


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


# By the kinds of `docker system df`: the command whose sum docker tells, and what it takes away.
_PRUNED = {
    "images": (
        "docker image prune -a",
        "every image that no container uses, yours and those kept for a way back",
    ),
    "build cache": ("docker builder prune -a", "what builds would find again"),
}


def judge_capacity(needs: NeedsPlan, survey: Survey) -> Verdict:
    """Compare disk and memory with what the plan needs."""
    problems = (*_disk(needs, survey), *_others(survey), *_memory(needs, survey))
    return Verdict(problems, tuple(_unknown_memory(needs, survey)))


@dataclass(frozen=True, slots=True)
class Demand:
    """What one filesystem has to take."""

    mount: str
    available_bytes: int
    needed_bytes: int
    paths: tuple[str, ...]


def demands(needs: NeedsPlan, survey: Survey) -> tuple[Demand, ...]:
    """Add up what is still to be written per filesystem, less what is there or can be linked."""
    by_path = {place.path: place for place in survey.places}
    downloads = dict(needs.downloads)
    images_there = bool(needs.images) and set(needs.images) <= set(survey.images)
    done_with = dict(needs.disk_done_once_there)
    totals: dict[str, Demand] = {}
    for path, wanted_bytes in needs.disk_needed_bytes:
        place = by_path.get(path)
        if place is None:
            continue
        done_bytes = max(
            place.present_bytes, survey.stored.linkable_bytes(path, downloads.get(path, ()))
        )
        if path == needs.docker_dir:
            there = sum(size for tag, size in needs.image_bytes if tag in survey.images)
            done_bytes = wanted_bytes if images_there else there
        tree = by_path.get(done_with.get(path, ""))
        if tree is not None and tree.present_bytes:
            done_bytes = wanted_bytes
        so_far = totals.get(place.mount, Demand(place.mount, place.available_bytes, 0, ()))
        totals[place.mount] = Demand(
            place.mount,
            place.available_bytes,
            so_far.needed_bytes + max(0, wanted_bytes - done_bytes),
            (*so_far.paths, place.folder or path),
        )
    return tuple(totals.values())


def _disk(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    missing = [path for path, _ in needs.disk_needed_bytes if path not in _seen(survey)]
    if missing:
        yield Problem("disk", f"could not read {', '.join(missing)}", "look at `df` on the host")
    for demand in demands(needs, survey):
        # A host on which everything is in place may fill up; that stops no one from serving.
        if not demand.needed_bytes:
            continue
        wanted = demand.needed_bytes + needs.disk_reserve_bytes
        if demand.available_bytes >= wanted:
            continue
        yield Problem(
            f"disk {demand.mount}",
            f"{demand.available_bytes / GIB:.1f} GiB free, "
            f"{demand.needed_bytes / GIB:.1f} GiB to be written and "
            f"{needs.disk_reserve_bytes / GIB:.1f} GiB kept free "
            f"(for {', '.join(demand.paths)})",
            "; ".join([
                f"free {(wanted - demand.available_bytes) / GIB:.1f} GiB",
                *_given_back(survey),
            ]),
        )  # fmt: skip


def _given_back(survey: Survey) -> Iterator[str]:
    """Say what frees the sum that docker tells, and what that removes.

    Of containers and volumes nothing is said: only their owner knows what they are for.
    """
    for item in survey.reclaimable:
        if said := _PRUNED.get(item.what):
            command, removed = said
            yield f"`{command}` gives back up to {item.bytes / GIB:.1f} GiB: it removes {removed}"


def _others(survey: Survey) -> Iterator[Problem]:
    """Yield each folder in which somebody else could put other files in the place of ours."""
    for above in survey.above:
        if why := above.why_not_roots:
            yield Problem(
                above.path,
                f"{why}, and models are to lie below it: who may write there can replace them "
                "after they were verified",
                "set paths to a place where all folders above are root's, or "
                f"`chown root: {above.path} && chmod go-w {above.path}`",
            )


def _seen(survey: Survey) -> set[str]:
    return {place.path for place in survey.places}


def _memory(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    memory = survey.memory
    if memory.total_bytes < needs.memory_total_min_bytes:
        counted = (
            f"{memory.total_bytes / GIB:.1f} GiB in all, the plan counts on "
            f"{needs.memory_total_min_bytes / GIB:.1f} GiB"
        )
        total = _floor(memory.total_bytes / GIB, 1)
        if memory.total_bytes < needs.memory_needed_bytes:
            needed = f"{counted} and the engine needs {needs.memory_needed_bytes / GIB:.1f} GiB"
            fix = "choose a smaller model or profile for this host; `spark-deploy plan --data "
            yield Problem("memory", needed, f"{fix}memory.total_gib={total}` says whether it fits")
            return  # whatever is stopped or lowered
        yield Problem(
            "memory", counted, f"set memory.total_gib to {total} for this host, and plan again"
        )
    obtainable_bytes = survey.obtainable_bytes
    if obtainable_bytes is not None and obtainable_bytes < needs.memory_needed_bytes:
        once = " once our engines stop" if survey.serving else ""
        yield Problem(
            "memory",
            f"{obtainable_bytes / GIB:.1f} GiB available{once}, the engine needs "
            f"{needs.memory_needed_bytes / GIB:.1f} GiB to start",
            "stop what holds it (named above where it can be told), or lower "
            "engine.memory_fraction to "
            f"{_fitting_fraction(obtainable_bytes, memory.total_bytes)} for this host "
            "(engine.kv_cache_gib where the cache is pinned)",
        )


def _unknown_memory(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    available_bytes = survey.memory.available_bytes
    if survey.obtainable_bytes is None and available_bytes < needs.memory_needed_bytes:
        yield Problem(
            "memory",
            f"{available_bytes / GIB:.1f} GiB available, the engine needs "
            f"{needs.memory_needed_bytes / GIB:.1f} GiB, and the release of a running engine "
            "does not tell how much its stop frees: if that is too little, the new start waits "
            "and rolls back, without service meanwhile",
            "stop other processes that hold memory before the deploy",
        )


def _fitting_fraction(available_bytes: int, total_bytes: int) -> float:
    """Return the largest share of the pool with which an engine could start now."""
    return _floor(available_bytes / (total_bytes * START_MARGIN), 2)


def _floor(number: float, digits: int) -> float:
    return math.floor(number * 10.0**digits) / 10.0**digits
