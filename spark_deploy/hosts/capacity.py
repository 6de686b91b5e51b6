"""Compare the disk, memory, ports and GPU that a plan needs with what a host has."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from spark_deploy.config.errors import Problem
from spark_deploy.config.settings.host import DOCKER_DIR
from spark_deploy.hosts.disk import DiskUsage
from spark_deploy.hosts.docker_facts import Container
from spark_deploy.hosts.facts import container_id, is_managed
from spark_deploy.hosts.survey import Survey
from spark_deploy.plan.memory import START_MARGIN
from spark_deploy.plan.types import PreflightPlan

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Findings:
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...] = ()


class Finding(NamedTuple):
    is_error: bool
    problem: Problem


def error(where: str, message: str, fix: str) -> Finding:
    return Finding(True, Problem(where, message, fix))


def warning(where: str, message: str, fix: str) -> Finding:
    return Finding(False, Problem(where, message, fix))


def resource_findings(plan: PreflightPlan, survey: Survey) -> Iterator[Finding]:
    yield from _container_findings(plan, survey)
    yield from _port_findings(plan, survey)
    if plan.tailscale and not re.fullmatch(r"[0-9.]{7,15}", survey.tailscale):
        message = f"Tailscale has no address on this host: {survey.tailscale or 'no output'}"
        fix = "run `tailscale up` on the host, or set serve.expose to another value"
        yield error("tailscale", message, fix)
    obtainable_bytes = _obtainable_bytes(plan, survey)
    lacks_memory = obtainable_bytes is not None and obtainable_bytes < plan.memory_needed_bytes
    for problem in _memory_holder_problems(plan, survey):
        yield Finding(lacks_memory, problem)
    yield from _disk_findings(plan, survey)
    yield from _writable_parent_findings(survey)
    yield from _memory_findings(plan, survey)


def competing_containers(
    containers: Sequence[Container], allowed: Sequence[str] = ()
) -> tuple[Container, ...]:
    """Return unmanaged engines, except allowed ones, that run or that docker will restart."""
    return tuple(
        container
        for container in containers
        if container.is_engine
        and (container.alive or container.restarts)
        and not (container.managed or container.name in allowed)
    )


def _containers_to_stop(plan: PreflightPlan, survey: Survey) -> tuple[Container, ...]:
    """Return the running containers in ``takeover``, whose memory and ports become free."""
    competing = competing_containers(survey.containers)
    return tuple(c for c in competing if c.name in plan.takeover and c.alive)


def _obtainable_bytes(plan: PreflightPlan, survey: Survey) -> int | None:
    """Memory available after all engines stop; ``None`` if unknown."""
    return None if _containers_to_stop(plan, survey) else survey.obtainable_bytes


def _container_findings(plan: PreflightPlan, survey: Survey) -> Iterator[Finding]:
    for container in competing_containers(survey.containers, plan.allow_containers):
        if container.name in plan.takeover:
            continue
        name = container.name
        yield error(
            f"container {name}",
            f"another engine ({container.image}, {container.state}, "
            f"restart policy {container.restart}); two engines do not fit in memory",
            f"run `docker update --restart=no {name}; docker stop {name}`, "
            "list the container in `takeover` to let the deploy stop it, "
            "or add it to `allow_containers` with the GiB that it uses",
        )


def _port_findings(plan: PreflightPlan, survey: Survey) -> Iterator[Finding]:
    stopping = _containers_to_stop(plan, survey)
    for listener in survey.listeners:
        is_published = any(str(listener.port) in container.ports for container in stopping)
        in_container = container_id(listener.cgroup) in {container.id for container in stopping}
        if listener.port not in plan.ports or is_published or in_container:
            continue
        where, planned_ports = f"port {listener.port}", plan.gateways.get(listener.service)
        if planned_ports and listener.port not in planned_ports:
            message = (
                f"the gateway of {listener.service} is still listening on another service's port"
            )
            fix = f"deploy {listener.service} with the new port first, then the other service"
            yield error(where, message, fix)
        elif not is_managed(listener.cgroup):
            process = (
                f"{listener.process} (pid {listener.pid})" if listener.process else "a process"
            )
            message = f"{process} is already listening on {listener.address}"
            yield error(where, message, "stop it, or choose another serve.port")


def _memory_holder_problems(plan: PreflightPlan, survey: Survey) -> Iterator[Problem]:
    """Yield processes that use a lot of memory or the GPU, unless they are managed or allowed."""
    allowed_names = {*plan.takeover, *plan.allow_containers}
    known_containers = {
        container.id
        for container in survey.containers
        if container.name in allowed_names or container.managed
    }
    gpu_users = {}
    for app in survey.gpu.compute_apps:
        # A process that exited during the survey may have been part of our engine.
        may_be_ours = not app.cgroup and survey.serving
        if not may_be_ours and container_id(app.cgroup) not in known_containers:
            gpu_users[app.pid] = app.name
    fix = "stop the process if its memory use can grow, otherwise add it to allow_memory_holders"
    for process in survey.processes:
        uses_gpu = gpu_users.pop(process.pid, None) is not None
        if is_managed(process.cgroup) or container_id(process.cgroup) in known_containers:
            continue
        if process.name not in plan.allow_memory_holders:
            message = f"pid {process.pid} uses {process.rss_bytes / GIB:.1f} GiB"
            message += " and the GPU" if uses_gpu else ""
            yield Problem(f"process {process.name}", message, fix)
    for pid, name in gpu_users.items():
        if name.rsplit("/", 1)[-1] not in plan.allow_memory_holders:
            yield Problem(f"process {name}", f"pid {pid} uses the GPU", fix)


@dataclass(frozen=True, slots=True)
class DiskDemand:
    mount: str
    available_bytes: int
    needed_bytes: int
    paths: tuple[str, ...]


def disk_demands(plan: PreflightPlan, survey: Survey) -> tuple[DiskDemand, ...]:
    """Add up the bytes to write to each filesystem, except files that exist or can be linked."""
    usage_by_path = {usage.path: usage for usage in survey.disk_usage}
    demands: dict[str, DiskDemand] = {}
    for path, size_bytes in plan.disk_needed_bytes:
        usage = usage_by_path.get(path)
        if usage is None:
            continue
        demand = demands.get(usage.mount, DiskDemand(usage.mount, usage.available_bytes, 0, ()))
        missing_bytes = max(0, size_bytes - _present_bytes(plan, survey, usage, size_bytes))
        demands[usage.mount] = replace(
            demand,
            needed_bytes=demand.needed_bytes + missing_bytes,
            paths=(*demand.paths, usage.folder or path),
        )
    return tuple(demands.values())


def _present_bytes(plan: PreflightPlan, survey: Survey, usage: DiskUsage, size_bytes: int) -> int:
    """Return how many bytes of the planned size need no additional space."""
    if usage.path == DOCKER_DIR:
        if plan.images and set(plan.images) <= set(survey.images):
            return size_bytes
        return sum(size for tag, size in plan.image_bytes if tag in survey.images)
    # If this checkpoint exists, its download is not needed.
    checkpoint = dict(plan.skip_disk_if_present).get(usage.path, "")
    if any(other.path == checkpoint and other.present_bytes for other in survey.disk_usage):
        return size_bytes
    files = dict(plan.downloads).get(usage.path, ())
    return max(usage.present_bytes, survey.stored.linkable_bytes(usage.path, files))


def _disk_findings(plan: PreflightPlan, survey: Survey) -> Iterator[Finding]:
    measured = {usage.path for usage in survey.disk_usage}
    if missing := [path for path, _ in plan.disk_needed_bytes if path not in measured]:
        message = f"could not read the disk usage of {', '.join(missing)}"
        yield error("disk", message, "check `df` on the host")
    for demand in disk_demands(plan, survey):
        required_bytes = demand.needed_bytes + plan.disk_reserve_bytes
        # A full disk does not stop a service that writes nothing.
        if not demand.needed_bytes or demand.available_bytes >= required_bytes:
            continue
        fixes = [f"free {(required_bytes - demand.available_bytes) / GIB:.1f} GiB"]
        for kind, (command, removed) in _PRUNE_COMMANDS.items():
            if kind in survey.reclaimable:
                freed_gib = survey.reclaimable[kind] / GIB
                fixes.append(f"`{command}` removes {removed} (up to {freed_gib:.1f} GiB)")
        message = (
            f"only {demand.available_bytes / GIB:.1f} GiB are free, but the deploy "
            f"writes {demand.needed_bytes / GIB:.1f} GiB to {', '.join(demand.paths)} "
            f"and keeps {plan.disk_reserve_bytes / GIB:.1f} GiB free"
        )
        yield error(f"disk {demand.mount}", message, "; ".join(fixes))


# `docker system df` also lists containers and volumes, but only their owner knows their purpose.
_PRUNE_COMMANDS = {
    "images": (
        "docker image prune -a",
        "all images that no container uses, including those kept for rollback",
    ),
    "build cache": ("docker builder prune -a", "the build cache"),
}


def _writable_parent_findings(survey: Survey) -> Iterator[Finding]:
    """Yield directories in which another user could replace our files."""
    for parent in survey.parents:
        if parent.write_risk:
            yield error(
                parent.path,
                f"{parent.write_risk}, so verified models in it could be replaced",
                "set the paths to directories whose parents only root can write to, "
                f"or run `chown root: {parent.path} && chmod go-w {parent.path}`",
            )


def _memory_findings(plan: PreflightPlan, survey: Survey) -> Iterator[Finding]:
    memory, needed = survey.memory, f"{plan.memory_needed_bytes / GIB:.1f} GiB"
    if memory.total_bytes < plan.memory_total_min_bytes:
        message = (
            f"the host has {memory.total_bytes / GIB:.1f} GiB of memory, "
            f"but the plan expects {plan.memory_total_min_bytes / GIB:.1f} GiB"
        )
        host_gib = _floor(memory.total_bytes / GIB, 1)
        if memory.total_bytes < plan.memory_needed_bytes:
            fix = (
                "choose a smaller model or profile for this host; "
                f"`spark-deploy plan --data memory.total_gib={host_gib}` shows whether a model fits"
            )
            yield error("memory", f"{message}, and the engine needs {needed}", fix)
            return
        fix = f"set memory.total_gib to {host_gib} for this host, and plan again"
        yield error("memory", message, fix)
    obtainable_bytes = _obtainable_bytes(plan, survey)
    if obtainable_bytes is None:
        if memory.available_bytes < plan.memory_needed_bytes:
            yield warning(
                "memory",
                f"{memory.available_bytes / GIB:.1f} GiB available, but the engine needs {needed}; "
                "the memory that the running engine will free is unknown; "
                "if it is too little, the rollout restores the old release after an outage",
                "before the deploy, stop other processes that use memory",
            )
    elif obtainable_bytes < plan.memory_needed_bytes:
        after_stop = " once our engines stop" if survey.serving else ""
        fraction = _floor(obtainable_bytes / (memory.total_bytes * START_MARGIN), 2)
        yield error(
            "memory",
            f"{obtainable_bytes / GIB:.1f} GiB available{after_stop}, "
            f"but the engine needs {needed} to start",
            "stop other processes that use memory (listed above if known), "
            f"or lower engine.memory_fraction to {fraction} for this host "
            "(or engine.kv_cache_gib, if it is set)",
        )


def _floor(number: float, digits: int) -> float:
    return math.floor(number * 10.0**digits) / 10.0**digits
