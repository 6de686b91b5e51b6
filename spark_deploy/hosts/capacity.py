"""Room for the plan: disk, memory, ports, and other users of the GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.docker_facts import Container
from spark_deploy.hosts.survey import Survey
from spark_deploy.plan.machine import NeedsPlan
from spark_deploy.plan.memory import START_MARGIN

GIB = 1 << 30


def judge_workloads(needs: NeedsPlan, survey: Survey) -> Verdict:
    """Find what would fight with our engine for memory, GPU or ports."""
    problems = [*_containers(needs, survey), *_ports(needs, survey), *_tailnet(needs, survey)]
    holders = tuple(_holders(needs, survey))
    obtainable_bytes = survey.obtainable_bytes
    if obtainable_bytes is not None and obtainable_bytes < needs.memory_needed_bytes:
        return Verdict((*problems, *holders))
    return Verdict(tuple(problems), holders)


def competing_containers(
    containers: Sequence[Container], allowed: Sequence[str] = ()
) -> tuple[Container, ...]:
    """List engine containers of others that run, or that docker may start again."""
    return tuple(
        container
        for container in containers
        if container.is_engine and not container.ours and (container.alive or container.comes_back)
        if container.name not in allowed
    )


def _containers(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    for container in competing_containers(survey.containers, needs.allow_containers):
        if container.name in needs.takeover:
            continue
        yield Problem(
            f"container {container.name}",
            f"another engine ({container.image}) is {container.state}, restart: "
            f"{container.restart}; two engines do not fit into the memory",
            f"stop it (`docker update --restart=no {container.name}; docker stop "
            f"{container.name}`), or add it to takeover: to have that done, or to "
            "allow_containers: with the GiB it may take",
        )


def _ports(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    for listener in survey.listeners:
        wanted = needs.gateways.get(listener.service)
        if listener.port in needs.ports and wanted and listener.port not in wanted:
            what = f"the gateway of {listener.service} still listens there; another is to have it"
            fix = f"deploy {listener.service} with its new port first, then give this one away"
            yield Problem(f"port {listener.port}", what, fix)
        if listener.port not in needs.ports or listener.ours:
            continue
        who = f"{listener.process} (pid {listener.pid})" if listener.process else "someone"
        yield Problem(
            f"port {listener.port}",
            f"{who} already listens on {listener.address}",
            "stop it, or choose another serve.port",
        )


def _tailnet(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    if not needs.tailscale or re.fullmatch(r"[0-9.]{7,15}", survey.tailscale):
        return
    yield Problem(
        "tailscale",
        f"has no address on this host: {survey.tailscale or 'the command says nothing'}",
        "run `tailscale up` there, or choose another serve.expose",
    )


def _holders(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    """Yield each unmanaged process that holds memory or the GPU."""
    named = {*needs.takeover, *needs.allow_containers}
    known_containers = {c.id for c in survey.containers if c.name in named or c.ours}
    on_gpu = {
        app.pid: app.name
        for app in survey.gpu.compute_apps
        # While our engine runs, a process that ended between two questions may have been its own.
        if app.container_id not in known_containers and (app.cgroup or not survey.serving)
    }
    fix = "stop it if it can grow, or add its name to allow_memory_holders:"
    for process in survey.processes:
        gpu_name = on_gpu.pop(process.pid, None)
        if process.ours or process.container_id in known_containers:
            continue
        if not _allowed(needs, process.name):
            what = f"pid {process.pid} holds {process.rss_bytes / GIB:.1f} GiB"
            what += " and the GPU" if gpu_name else ""
            yield Problem(f"process {process.name}", what, fix)
    for pid, name in on_gpu.items():
        if not _allowed(needs, name.rsplit("/", 1)[-1]):
            yield Problem(f"process {name}", f"pid {pid} uses the GPU", fix)


def _allowed(needs: NeedsPlan, name: str) -> bool:
    return name in needs.allow_memory_holders


@dataclass(frozen=True, slots=True)
class Verdict:
    """What speaks against using the host (``problems``) and what its owner should know."""

    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...] = ()


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
    problems = (*_disk(needs, survey), *_above(survey), *_memory(needs, survey))
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


def _above(survey: Survey) -> Iterator[Problem]:
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
