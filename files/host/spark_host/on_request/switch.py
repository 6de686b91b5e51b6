"""Starts an on-demand service, and stops others to free memory."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spark_contract.release import Release
from spark_contract.tool import HostToolError

from spark_host.engine import memory, on_request
from spark_host.engine.client import Engine, EngineError
from spark_host.gateway import traffic
from spark_host.records import boot, proof
from spark_host.system.host import Host
from spark_host.system.programs import log
from spark_host.watch import watchdog

FAILURES = (HostToolError, OSError, subprocess.SubprocessError)
_EXTRA_START_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Limits:
    wait_s: float = 300.0  # for a request without streaming
    stream_wait_s: float = 3600.0
    comment_s: float = 5.0  # between two comments in a stream
    serve_s: float = (
        60.0  # minimum before a service stops for another; or the time of its last start, if longer
    )
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
        """Return the seconds that the last start took; 0 if unknown."""
        release = self.release(service)
        last = proof.read(release.name, self.host) if release else None
        return self.took_s.get(service) or sum((last.start_times_s if last else {}).values())

    def start(self, service: str, is_wanted: Callable[[], bool]) -> bool:
        """Start the proven release; return ``False`` if it has to wait or is no longer wanted.

        If the start fails, start the stopped releases again and raise the error.
        """
        host, release = self.host, self.release(service)
        if release is None:
            raise HostToolError(service, "has no proven release", "run the deploy for this host")
        others = on_request.releases_to_stop(release, host, memory.available_bytes())
        if not all(self._served_enough(other.service) for other in others):
            return False
        stopped: list[Release] = []
        began = time.monotonic()
        try:
            with host.disk.locked(host.paths.rollout_lock(service)):
                try:
                    for other in others:
                        log(f"stopping {other.name} for {release.name}")
                        if not on_request.stop(other, host, self.limits.drain_s, is_wanted):
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

    def _served_enough(self, service: str) -> bool:
        served_s = time.time() - on_request.serving_since(service, self.host.paths)
        return served_s >= max(self.limits.serve_s, self.expected_s(service))

    def _restore(self, failed: Release, stopped: list[Release], error: Exception) -> None:
        watchdog.record_event(failed, "on-request", f"did not start: {error}", self.host.paths)
        try:
            boot.stop_until_request(failed, self.host)
            for release in stopped:
                log(f"starting {release.name} again")
                boot.allow_start(release.service, self.host)
                _start(release, self.host)
        except FAILURES as second:
            watchdog.record_event(failed, "on-request", f"not restored: {second}", self.host.paths)

    def note_use(self, service: str) -> None:
        """Record whether the engine has worked since the last call."""
        paths, release = self.host.paths, self.release(service)
        if release is None or not traffic.is_open(service, paths):
            return
        try:
            metrics = Engine.for_release(release, paths).metrics(5)
            before, self._progress[service] = self._progress.get(service), metrics.progress
            in_use = metrics.unfinished > 0 or before not in (None, metrics.progress)
        except EngineError:  # it may be too busy to respond
            in_use = True
        if in_use:
            paths.last_use(service).touch()
            os.utime(paths.last_use(service))

    def stop_if_idle(self, service: str) -> None:
        limit_s = on_request.idle_limit_s(service, self.host.paths)
        release, paths = self.release(service), self.host.paths
        idle_s = time.time() - on_request.last_use(service, paths)
        if limit_s and release and traffic.is_open(service, paths) and idle_s > limit_s:
            log(f"stopping {release.name}: no request for {idle_s:.0f} s")
            on_request.stop(release, self.host, self.limits.drain_s)


def _start(release: Release, host: Host) -> None:
    host.units.start(release.serve_unit, release.timeouts.start_s + _EXTRA_START_TIMEOUT_S)
    # It was already running if an earlier stop was interrupted.
    if boot.opens_at_start(release, host) and not traffic.is_open(release.service, host.paths):
        traffic.open_for(release, host.paths)
