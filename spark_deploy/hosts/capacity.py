"""Disk, memory, ports and GPU that a plan needs on a host."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spark_deploy.config.errors import Problem
from spark_deploy.config.settings.host import DOCKER_DIR
from spark_deploy.hosts.docker_facts import Container
from spark_deploy.hosts.facts import container_id, is_managed
from spark_deploy.hosts.survey import Survey
from spark_deploy.plan.memory import START_MARGIN
from spark_deploy.plan.types import NeedsPlan

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Verdict:
    problems: tuple[Problem, ...]  # reasons to refuse the host
    warnings: tuple[Problem, ...] = ()


def judge_workloads(needs: NeedsPlan, survey: Survey) -> Verdict:
    problems = [*_container_problems(needs, survey), *_port_problems(needs, survey)]
    if needs.tailscale and not re.fullmatch(r"[0-9.]{7,15}", survey.tailscale):
        message = f"has no address on this host: {survey.tailscale or 'no output'}"
        fix = "run `tailscale up` on the host, or choose another serve.expose"
        problems.append(Problem("tailscale", message, fix))
    holders = tuple(_memory_holder_problems(needs, survey))
    obtainable_bytes = survey.obtainable_bytes
    if obtainable_bytes is not None and obtainable_bytes < needs.memory_needed_bytes:
        return Verdict((*problems, *holders))
    return Verdict(tuple(problems), holders)


def competing_containers(
    containers: Sequence[Container], allowed: Sequence[str] = ()
) -> tuple[Container, ...]:
    """List unmanaged engines that run, or that docker may start again."""
    return tuple(
        container
        for container in containers
        if container.is_engine and not container.managed
        if (container.alive or container.restarts) and container.name not in allowed
    )


def _container_problems(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    for container in competing_containers(survey.containers, needs.allow_containers):
        if container.name in needs.takeover:
            continue
        name = container.name
        yield Problem(
            f"container {name}",
            f"another engine ({container.image}) is {container.state}, restart: "
            f"{container.restart}; two engines do not fit into the memory",
            f"stop it (`docker update --restart=no {name}; docker stop {name}`), or add it to "
            "`takeover` to let the deploy stop it, or to `allow_containers` with the GiB it uses",
        )


def _port_problems(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    for listener in survey.listeners:
        if listener.port not in needs.ports:
            continue
        where, planned = f"port {listener.port}", needs.gateways.get(listener.service)
        if planned and listener.port not in planned:
            message = f"the gateway of {listener.service} still listens on another service's port"
            fix = f"deploy {listener.service} with the new port first, then the other service"
            yield Problem(where, message, fix)
        elif not is_managed(listener.cgroup):
            process = (
                f"{listener.process} (pid {listener.pid})" if listener.process else "a process"
            )
            message = f"{process} already listens on {listener.address}"
            yield Problem(where, message, "stop it, or choose another serve.port")


def _memory_holder_problems(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    named = {*needs.takeover, *needs.allow_containers}
    known_containers = {
        container.id
        for container in survey.containers
        if container.name in named or container.managed
    }
    on_gpu = {
        app.pid: app.name
        for app in survey.gpu.compute_apps
        # A process that exited during the survey may have been part of our engine.
        if container_id(app.cgroup) not in known_containers and (app.cgroup or not survey.serving)
    }
    fix = "stop it if its memory use could grow, or add its name to allow_memory_holders"
    for process in survey.processes:
        gpu_name = on_gpu.pop(process.pid, None)
        if is_managed(process.cgroup) or container_id(process.cgroup) in known_containers:
            continue
        if process.name not in needs.allow_memory_holders:
            message = f"pid {process.pid} uses {process.rss_bytes / GIB:.1f} GiB"
            message += " and the GPU" if gpu_name else ""
            yield Problem(f"process {process.name}", message, fix)
    for pid, name in on_gpu.items():
        if name.rsplit("/", 1)[-1] not in needs.allow_memory_holders:
            yield Problem(f"process {name}", f"pid {pid} uses the GPU", fix)


def judge_capacity(needs: NeedsPlan, survey: Survey) -> Verdict:
    problems = (
        *_disk_problems(needs, survey),
        *_writable_parent_problems(survey),
        *_memory_problems(needs, survey),
    )
    return Verdict(problems, tuple(_unknown_memory_problems(needs, survey)))


@dataclass(frozen=True, slots=True)
class Demand:
    mount: str
    available_bytes: int
    needed_bytes: int
    paths: tuple[str, ...]


def demands(needs: NeedsPlan, survey: Survey) -> tuple[Demand, ...]:
    """Add up bytes to write per filesystem, without those present or linkable."""
    places = {place.path: place for place in survey.places}
    totals: dict[str, Demand] = {}
    for path, wanted_bytes in needs.disk_needed_bytes:
        if (place := places.get(path)) is None:
            continue
        before = totals.get(place.mount, Demand(place.mount, place.available_bytes, 0, ()))
        missing_bytes = max(0, wanted_bytes - _present_bytes(needs, survey, path, wanted_bytes))
        totals[place.mount] = Demand(
            place.mount,
            place.available_bytes,
            before.needed_bytes + missing_bytes,
            (*before.paths, place.folder or path),
        )
    return tuple(totals.values())


def _present_bytes(needs: NeedsPlan, survey: Survey, path: str, wanted_bytes: int) -> int:
    present = {place.path: place.present_bytes for place in survey.places}
    checkpoint = dict(needs.skip_disk_if_present).get(path, "")
    if present.get(checkpoint):
        return wanted_bytes
    if path == DOCKER_DIR:
        complete = bool(needs.images) and set(needs.images) <= set(survey.images)
        sizes = (size for tag, size in needs.image_bytes if tag in survey.images)
        return wanted_bytes if complete else sum(sizes)
    linkable = survey.stored.linkable_bytes(path, dict(needs.downloads).get(path, ()))
    return max(present[path], linkable)


def _disk_problems(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    read = {place.path for place in survey.places}
    missing = [path for path, _ in needs.disk_needed_bytes if path not in read]
    if missing:
        yield Problem("disk", f"could not read {', '.join(missing)}", "check `df` on the host")
    for demand in demands(needs, survey):
        wanted = demand.needed_bytes + needs.disk_reserve_bytes
        # A full disk does not stop a service that writes nothing.
        if not demand.needed_bytes or demand.available_bytes >= wanted:
            continue
        fixes = [f"free {(wanted - demand.available_bytes) / GIB:.1f} GiB"]
        for kind, size_bytes in survey.reclaimable.items():
            if kind in _PRUNE:
                command, removed = _PRUNE[kind]
                freed = f"frees up to {size_bytes / GIB:.1f} GiB: it removes {removed}"
                fixes.append(f"`{command}` {freed}")
        yield Problem(
            f"disk {demand.mount}",
            f"{demand.available_bytes / GIB:.1f} GiB free, "
            f"{demand.needed_bytes / GIB:.1f} GiB to be written and "
            f"{needs.disk_reserve_bytes / GIB:.1f} GiB kept free "
            f"(for {', '.join(demand.paths)})",
            "; ".join(fixes),
        )


# Containers and volumes are left out: only their owner knows their purpose.
_PRUNE = {
    "images": (
        "docker image prune -a",
        "every image that no container uses, yours and those kept for rollback",
    ),
    "build cache": ("docker builder prune -a", "cached layers of later builds"),
}


def _writable_parent_problems(survey: Survey) -> Iterator[Problem]:
    """Yield directories in which another user could replace our files."""
    for parent in survey.parents:
        if parent.writer:
            yield Problem(
                parent.path,
                f"{parent.writer}; models below it can be replaced after they were verified",
                "set paths to directories whose parents all belong to root, or "
                f"`chown root: {parent.path} && chmod go-w {parent.path}`",
            )


def _memory_problems(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    memory, needed = survey.memory, f"{needs.memory_needed_bytes / GIB:.1f} GiB"
    if memory.total_bytes < needs.memory_total_min_bytes:
        message = (
            f"{memory.total_bytes / GIB:.1f} GiB in total, the plan expects "
            f"{needs.memory_total_min_bytes / GIB:.1f} GiB"
        )
        total = _floor(memory.total_bytes / GIB, 1)
        if memory.total_bytes < needs.memory_needed_bytes:
            fix = (
                "choose a smaller model or profile for this host; "
                f"`spark-deploy plan --data memory.total_gib={total}` shows whether it fits"
            )
            yield Problem("memory", f"{message} and the engine needs {needed}", fix)
            return
        fix = f"set memory.total_gib to {total} for this host, and plan again"
        yield Problem("memory", message, fix)
    obtainable_bytes = survey.obtainable_bytes
    if obtainable_bytes is not None and obtainable_bytes < needs.memory_needed_bytes:
        once = " once our engines stop" if survey.serving else ""
        # Share of the memory with which an engine could start now.
        fraction = _floor(obtainable_bytes / (memory.total_bytes * START_MARGIN), 2)
        yield Problem(
            "memory",
            f"{obtainable_bytes / GIB:.1f} GiB available{once}, the engine needs {needed} to start",
            "stop the processes that use it (listed above if known), or lower "
            f"engine.memory_fraction to {fraction} for this host "
            "(engine.kv_cache_gib where the cache is pinned)",
        )


def _unknown_memory_problems(needs: NeedsPlan, survey: Survey) -> Iterator[Problem]:
    available_bytes = survey.memory.available_bytes
    if survey.obtainable_bytes is None and available_bytes < needs.memory_needed_bytes:
        yield Problem(
            "memory",
            f"{available_bytes / GIB:.1f} GiB available, the engine needs "
            f"{needs.memory_needed_bytes / GIB:.1f} GiB, and it is unknown how much the running "
            "engine frees when it stops: if that is too little, the rollout fails and returns to "
            "the old release, with an outage",
            "stop other processes that use memory before the deploy",
        )


def _floor(number: float, digits: int) -> float:
    return math.floor(number * 10.0**digits) / 10.0**digits
