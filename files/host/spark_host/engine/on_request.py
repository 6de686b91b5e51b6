"""On-demand services: last use, starts, and stops that free memory for other services."""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from spark_contract.paths import Paths
from spark_contract.release import Release, parse_service
from spark_contract.tool import PHASE, HostToolError

from spark_host.engine import memory
from spark_host.engine.client import Engine, EngineError, EngineTimeoutError
from spark_host.gateway import gateway
from spark_host.records import boot
from spark_host.system.host import Host, load_gateway, record_event
from spark_host.system.programs import Report, log

_FREE_TIMEOUT_S = 30.0  # a Spark frees memory only after the process has exited
FAILURES = (HostToolError, OSError, subprocess.SubprocessError)
_EXTRA_START_TIMEOUT_S = 900.0


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
    """Return the number of unfinished requests, or 1 if the engine is too busy to respond."""
    try:
        return Engine.for_release(release, paths).metrics(5).unfinished
    except EngineTimeoutError:
        return 1
    except EngineError:
        return 0


def releases_to_stop(release: Release, host: Host, available_bytes: float) -> list[Release]:
    """Return the on-demand releases that must stop so that ``release`` fits, longest idle first.

    Return an empty list if ``release`` would not fit even then. The memory of a service that always
    runs stays reserved while the service restarts.
    """
    names = host.disk.release_names(host.paths)
    services = set(map(parse_service, names)) - {release.service}
    on_request = {name for name in services if idle_limit_s(name, host.paths) is not None}
    if not on_request:
        return []
    candidates, needed_bytes = [], release.memory.needed_bytes
    unreserved_bytes = memory.meminfo()["MemTotal"] - release.memory.floor_bytes
    for service in services:
        other = host.release(boot.active_release(service, host))
        if other and service in on_request and host.units.is_active(other.serve_unit):
            candidates.append(other)
        elif other is None and service not in on_request and not boot.is_stopped(service, host):
            other = host.release(boot.read_known_good(service, host).release)
            available_bytes -= other.memory.needed_bytes if other else 0
        unreserved_bytes -= other.memory.needed_bytes if other else 0
    candidates.sort(key=lambda candidate: last_use(candidate.service, host.paths))
    to_stop: list[Release] = []
    while candidates and min(available_bytes, unreserved_bytes) < needed_bytes:
        to_stop.append(candidates.pop(0))
        available_bytes += to_stop[-1].memory.needed_bytes
        unreserved_bytes += to_stop[-1].memory.needed_bytes
    return to_stop if min(available_bytes, unreserved_bytes) >= needed_bytes else []


def free_memory(release: Release, host: Host, report: Report) -> None:
    """Stop on-demand services so that ``release`` fits; stop none if it would not fit anyway."""
    # Ignore the available memory at first, because it grows only after processes have exited.
    for other in releases_to_stop(release, host, available_bytes=float("inf")):
        _stop_for(release, other, host, report)
    deadline = host.clock.monotonic() + _FREE_TIMEOUT_S
    while others := releases_to_stop(release, host, memory.available_bytes()):
        if host.clock.monotonic() > deadline:
            break
        host.clock.sleep(1)
    for other in others:
        _stop_for(release, other, host, report)


def _stop_for(release: Release, other: Release, host: Host, report: Report) -> None:
    text = f"stopping the on-demand release {other.name} to free memory for {release.name}"
    report(f"{PHASE}memory {text}")
    with suppress(BlockingIOError):  # a rollout of the other service is running
        stop(other, host, other.timeouts.drain_s)


def stop(
    release: Release, host: Host, drain_s: float, is_wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Wait for in-flight requests, then stop a release until the next request.

    If the stop is no longer wanted meanwhile, let the release serve again and return ``False``.
    """
    with host.disk.locked(host.paths.rollout_lock(release.service)):
        gateway.close_traffic(release.service, host.paths)
        deadline = host.clock.monotonic() + drain_s
        host.clock.sleep(0.2)  # for requests that have passed the gateway
        while count_unfinished(release, host.paths) > 0 and host.clock.monotonic() < deadline:
            if not is_wanted():
                gateway.open_traffic(release, host.paths)
                return False
            host.clock.sleep(0.2)
        boot.stop_until_request(release, host)
    return True


@dataclass(frozen=True, slots=True)
class Limits:
    wait_s: float = 300.0  # for a request without streaming
    stream_wait_s: float = 3600.0
    comment_s: float = 5.0  # between two comments in a stream
    # Minimum before a service stops for another; or the time of the last start, if longer.
    serve_s: float = 60.0
    drain_s: float = 600.0  # for in-flight requests of a service that stops for another
    back_off_s: float = 60.0  # after a failed start; doubles
    longest_back_off_s: float = 1800.0


@dataclass
class Switch:
    host: Host
    limits: Limits = field(default_factory=Limits)
    took_s: dict[str, float] = field(default_factory=dict)  # last start of each service
    _progress: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def release(self, service: str) -> Release | None:
        return self.host.release(boot.read_known_good(service, self.host).release)

    def expected_s(self, service: str) -> float:
        """Return how long the last start took; 0 if unknown."""
        release = self.release(service)
        proof = boot.read_proof(release.name, self.host) if release else None
        proven_s = sum(proof.start_times_s.values()) if proof else 0
        return self.took_s.get(service) or proven_s

    def start(self, service: str, is_wanted: Callable[[], bool]) -> bool:
        """Start the proven release; return ``False`` if the start must wait or is no longer wanted.

        If the start fails, start the stopped releases again and raise the error.
        """
        host, release = self.host, self.release(service)
        if release is None:
            raise HostToolError(service, "has no proven release", "run the deploy for this host")
        others = releases_to_stop(release, host, memory.available_bytes())
        if not all(self._has_served_long_enough(other.service) for other in others):
            return False
        stopped: list[Release] = []
        began = time.monotonic()
        try:
            with host.disk.locked(host.paths.rollout_lock(service)):
                try:
                    for other in others:
                        log(f"stopping {other.name} for {release.name}")
                        if not stop(other, host, self.limits.drain_s, is_wanted):
                            return False
                        stopped.append(other)
                    log(f"starting {release.name} for a request")
                    boot.allow_start(service, host)
                    _start(release, host)
                except FAILURES as error:
                    if not isinstance(error, BlockingIOError):
                        self._restore(release, stopped, error)
                    raise
        except BlockingIOError:  # a rollout is running
            return False
        self.took_s[service] = time.monotonic() - began
        return True

    def _has_served_long_enough(self, service: str) -> bool:
        served_s = time.time() - serving_since(service, self.host.paths)
        # A negative time means that the clock went back.
        return not 0 <= served_s < max(self.limits.serve_s, self.expected_s(service))

    def _restore(self, failed: Release, stopped: list[Release], error: Exception) -> None:
        record_event(failed, "on-request", f"did not start: {error}", self.host.paths)
        try:
            boot.stop_until_request(failed, self.host)
            for release in stopped:
                log(f"starting {release.name} again")
                boot.allow_start(release.service, self.host)
                _start(release, self.host)
        except FAILURES as restore_error:
            record_event(failed, "on-request", f"not restored: {restore_error}", self.host.paths)

    def record_use(self, service: str) -> None:
        """Update the time of last use if the engine has worked since the previous call."""
        paths, release = self.host.paths, self.release(service)
        if release is None or not gateway.is_open(service, paths):
            return
        try:
            metrics = Engine.for_release(release, paths).metrics(5)
            before = self._progress.get(service)
            self._progress[service] = metrics.progress
            in_use = metrics.unfinished > 0 or before not in (None, metrics.progress)
        except EngineError:  # it may be too busy to respond
            in_use = True
        if in_use:
            paths.last_use(service).touch()
            os.utime(paths.last_use(service))

    def stop_if_idle(self, service: str) -> None:
        limit_s = idle_limit_s(service, self.host.paths)
        release, paths = self.release(service), self.host.paths
        idle_s = time.time() - last_use(service, paths)
        if limit_s and release and gateway.is_open(service, paths) and idle_s > limit_s:
            log(f"stopping {release.name}: no request for {idle_s:.0f} s")
            stop(release, self.host, self.limits.drain_s)


def _start(release: Release, host: Host) -> None:
    host.units.start(release.serve_unit, release.timeouts.start_s + _EXTRA_START_TIMEOUT_S)
    # After an interrupted stop, the engine still runs with closed traffic; no start opens it.
    if boot.opens_at_start(release, host) and not gateway.is_open(release.service, host.paths):
        gateway.open_traffic(release, host.paths)
