"""On-demand services: when they were used, and which must stop so that another release fits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from spark_contract.paths import Paths
from spark_contract.release import Release, parse_service
from spark_contract.tool import PHASE, HostToolError

from spark_host.engine import memory
from spark_host.engine.client import Engine, EngineError, EngineTimeoutError
from spark_host.gateway import traffic
from spark_host.records import boot
from spark_host.system.host import Host, load_gateway
from spark_host.system.programs import Report

_FREE_TIMEOUT_S = 30.0  # a Spark frees memory only after the process has exited


def idle_limit_s(service: str, paths: Paths) -> int | None:
    """Return how long an on-demand service may be idle; ``None`` for a service that always runs."""
    try:
        return (load_gateway(service, paths).on_request or {}).get(service)
    except HostToolError:
        return None


def serving_since(service: str, paths: Paths) -> float:
    return _modified_at(paths.traffic(service))


def last_use(service: str, paths: Paths) -> float:
    return max(_modified_at(paths.last_use(service)), serving_since(service, paths))


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def count_unfinished(release: Release, paths: Paths) -> float:
    """Return how many requests run or wait, or 1 if the engine is too busy to respond."""
    try:
        return Engine.for_release(release, paths).metrics(5).unfinished
    except EngineTimeoutError:
        return 1
    except EngineError:
        return 0


def releases_to_stop(release: Release, host: Host, available_bytes: float) -> list[Release]:
    """Return the on-demand releases that must stop so that ``release`` fits, longest idle first.

    Return none if it still would not fit, because other programs use the memory. Services that
    always run keep their memory while they restart.
    """
    services = {parse_service(name) for name in host.disk.release_names(host.paths)} - {
        release.service
    }
    on_request = {name for name in services if idle_limit_s(name, host.paths) is not None}
    if not on_request:
        return []
    candidates, needed_bytes = [], release.memory.needed_bytes
    free_bytes = memory.meminfo()["MemTotal"] - release.memory.floor_bytes
    for service in services:
        running = host.release(boot.active_release(service, host))
        if running and service in on_request and host.units.is_active(running.serve_unit):
            candidates.append(running)
        elif running is None and service not in on_request and not boot.is_stopped(service, host):
            running = host.release(boot.read_known_good(service, host).release)
            available_bytes -= running.memory.needed_bytes if running else 0
        free_bytes -= running.memory.needed_bytes if running else 0
    candidates.sort(key=lambda other: last_use(other.service, host.paths))
    stopped: list[Release] = []
    while candidates and min(available_bytes, free_bytes) < needed_bytes:
        stopped.append(candidates.pop(0))
        available_bytes += stopped[-1].memory.needed_bytes
        free_bytes += stopped[-1].memory.needed_bytes
    return stopped if min(available_bytes, free_bytes) >= needed_bytes else []


def free_memory(release: Release, host: Host, report: Report) -> None:
    """Stop on-demand services until ``release`` fits; `wait_for_memory` fails if it does not."""
    for other in releases_to_stop(release, host, float("inf")):
        _stop_for(release, other, host, report)
    deadline = host.clock.monotonic() + _FREE_TIMEOUT_S
    while others := releases_to_stop(release, host, memory.available_bytes()):
        if host.clock.monotonic() > deadline:
            break
        host.clock.sleep(1)
    for other in others:
        _stop_for(release, other, host, report)


def _stop_for(release: Release, other: Release, host: Host, report: Report) -> None:
    report(f"{PHASE}memory stopping the on-demand release {other.name} for {release.name}")
    with suppress(BlockingIOError):  # a rollout of this service is running
        stop(other, host, other.timeouts.drain_s)


def stop(
    release: Release, host: Host, drain_s: float, is_wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Finish in-flight requests, then stop a release until the next request.

    If the stop is no longer wanted, the release continues to serve and the result is ``False``.
    """
    with host.disk.locked(host.paths.rollout_lock(release.service)):
        traffic.close(release.service, host.paths)
        deadline = host.clock.monotonic() + drain_s
        host.clock.sleep(0.2)  # for requests that have passed the gateway
        while count_unfinished(release, host.paths) > 0 and host.clock.monotonic() < deadline:
            if not is_wanted():
                traffic.open_for(release, host.paths)
                return False
            host.clock.sleep(0.2)
        boot.stop_until_request(release, host)
    return True
