"""Who else uses the host: other engines, processes that hold memory, strangers on our ports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.facts.docker import Container
from spark_deploy.hosts.facts.survey import Survey
from spark_deploy.hosts.preflight.verdict import Verdict
from spark_deploy.plan.machine import NeedsPlan

GIB = 1 << 30


def judge(needs: NeedsPlan, survey: Survey) -> Verdict:
    """Find what would fight with our engine for memory, GPU or ports."""
    problems = [*_containers(needs, survey), *_ports(needs, survey), *_tailnet(needs, survey)]
    holders = tuple(_holders(needs, survey))
    obtainable_bytes = survey.obtainable_bytes
    if obtainable_bytes is not None and obtainable_bytes < needs.memory_needed_bytes:
        return Verdict((*problems, *holders))
    return Verdict(tuple(problems), holders)


def in_the_way(
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
    for container in in_the_way(survey.containers, needs.allow_containers):
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
