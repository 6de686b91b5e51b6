"""The watchdog: kills an engine that stalls or exhausts the host's memory.

systemd then restarts the unit, up to the start limit.
"""

import contextlib
import socket
import subprocess
import threading
import time
from dataclasses import dataclass

from spark_contract.machine import FreeBlocks
from spark_contract.paths import Paths
from spark_contract.release import FRAGMENTED, KILLED, STALLED, STARVING, Release, Watch
from spark_contract.tool import HostToolError

from spark_host.engine import compile_cache, container
from spark_host.engine.client import Engine, EngineError, EngineTimeoutError, Metrics
from spark_host.engine.memory import MemoryFloor, available_bytes, read_free_blocks
from spark_host.gateway import gateway
from spark_host.records import boot
from spark_host.system import cluster, systemd
from spark_host.system.host import Host, load_release, record_event
from spark_host.watch import sensors

_UNFRAGMENTED_S = 600.0  # after this time, new fragmentation causes another event
_SENSORS_INTERVAL_S = 20.0
_METRICS_TIMEOUT_S = 5.0
_WORKER_INTERVAL_S = 0.5
# Successive samples, because a busy host may miss a single attempt.
_SILENT_SAMPLES = 3
_SILENCE_LIMIT_S = 10.0  # of a member on the fabric
_BACKLOG = 64
_EVENT_WAIT_S = 2.0
_UNIT_STOP_TIMEOUT_S = 20.0


@dataclass(slots=True)
class StallDetector:
    plan: Watch
    moved_at_s: float | None = None
    last_progress: tuple[float, ...] = ()
    silent_since_s: float | None = None
    silent_samples: int = 0

    def add_timeout(self, now_s: float) -> str | None:
        """Record that the engine did not respond in time; return a message if it has stalled.

        vLLM serves tokens and metrics from one process, so without metrics it sends no tokens.
        """
        if self.silent_since_s is None:
            self.silent_since_s = now_s
        self.silent_samples += 1
        silent_s = now_s - self.silent_since_s
        if silent_s < self.plan.stall_s or self.silent_samples < _SILENT_SAMPLES:
            return None
        return f"the engine is listening, but has not responded for {silent_s:.0f} s"

    def reset_timeouts(self) -> None:
        self.silent_since_s, self.silent_samples = None, 0

    def add_metrics(self, metrics: Metrics | None, now_s: float) -> str | None:
        """Return a message if requests are running, but tokens and cache usage stay the same."""
        if metrics is None:  # the engine has exited or is broken; systemd handles both
            return None
        progress = metrics.progress
        if metrics.running <= 0 or progress != self.last_progress or self.moved_at_s is None:
            self.last_progress, self.moved_at_s = progress, now_s
            return None
        idle_s = now_s - self.moved_at_s
        if idle_s < self.plan.stall_s:
            return None
        running = f"{metrics.running:.0f} requests are running"
        return f"{running}, but no token has been processed or generated for {idle_s:.0f} s"


class ClusterWatch:
    """Watches the other members of a cluster.

    A host that loses power or the cable leaves connections open, so a thread also connects to the
    other members.
    """

    def __init__(self, release: Release, paths: Paths):
        self._release, self._paths = release, paths
        # systemd starts the watchdog only after all members have joined.
        self._complete = True
        self._missed_at_s: dict[str, list[float]] = {}
        self._reached: set[str] = set()
        self._listener: socket.socket | None = None
        self.problem: str | None = None
        """Why the engine cannot continue; ``None`` while all members are connected."""

    def begin(self, stop: threading.Event) -> None:
        if self._release.cluster is not None:
            threading.Thread(target=self._watch, args=(stop,), daemon=True).start()

    def reset(self) -> None:
        self._complete, self.problem = False, None
        self._missed_at_s.clear()

    def _watch(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                self._update_listener()
                self.problem = self.problem or self._find_departed() or self._find_unresponsive()
            except HostToolError as error:  # without a cable, this host has no fabric address
                self.problem = str(error)
            stop.wait(min(self._release.watch.interval_s, _SILENCE_LIMIT_S / _SILENT_SAMPLES))

    def _find_departed(self) -> str | None:
        missing = cluster.describe_missing(self._release, self._paths)
        self._complete = self._complete or not missing
        return f"{missing} left the cluster" if missing and self._complete else None

    def _find_unresponsive(self) -> str | None:
        local, config = cluster.local_member(self._release, self._paths), self._release.cluster
        if config is None:
            return None
        for member in config.members:
            now = time.monotonic()
            if member == local:
                continue
            if cluster.responds(member, config, refusal_counts=True):
                self._reached.add(member.host)
                self._missed_at_s.pop(member.host, None)
            elif member.host in self._reached:
                missed_at_s = self._missed_at_s.setdefault(member.host, [])
                missed_at_s.append(now)
                silent_s = now - missed_at_s[0]
                if len(missed_at_s) >= _SILENT_SAMPLES and silent_s >= _SILENCE_LIMIT_S:
                    return f"{member.host} has not responded on the fabric for {silent_s:.0f} s"
        return None

    def _update_listener(self) -> None:
        """Listen while this release is proven on this host, so that other members can connect."""
        proven = boot.opens_at_start(self._release, Host(self._paths))
        local, config = cluster.local_member(self._release, self._paths), self._release.cluster
        if proven and local and config and self._listener is None:
            with contextlib.suppress(OSError):  # the next sample tries again
                address = (local.address, config.serving_port)
                self._listener = socket.create_server(address, backlog=_BACKLOG)
                self._listener.setblocking(False)
        elif not proven and self._listener is not None:
            self._listener.close()
            self._listener = None
        while self._listener is not None:  # accept and close all waiting connections
            try:
                self._listener.accept()[0].close()
            except OSError:
                return


def run(name: str, paths: Paths) -> int:
    release = load_release(name, paths)
    engine = Engine.for_release(release, paths)
    detector, floor = StallDetector(release.watch), MemoryFloor(release.memory.floor_bytes)
    is_worker, members = cluster.is_worker(release, paths), ClusterWatch(release, paths)
    pidfd = None
    stop = threading.Event()
    threading.Thread(target=_watch_sensors, args=(release, paths, stop), daemon=True).start()
    members.begin(stop)
    try:
        while True:
            if pidfd is None:
                pidfd = container.open_process(release.container)
            reason = floor.check(available_bytes())
            if reason is not None:
                kill_engine(release, STARVING, reason, pidfd, paths)
                floor.low_samples = 0
            if members.problem is not None:
                # A lost member must not use up the start limit.
                systemd.reset_failed(release.serve_unit, _METRICS_TIMEOUT_S)
                kill_engine(release, "member", members.problem, pidfd, paths)
                members.reset()
            reason = None if is_worker else _find_stall(engine, detector)
            if reason is not None:
                kill_engine(release, STALLED, reason, pidfd, paths)
                detector.moved_at_s = None
                detector.reset_timeouts()
            # Sample more often on a worker, because it still loads weights.
            time.sleep(_WORKER_INTERVAL_S if is_worker else release.watch.interval_s)
    finally:
        stop.set()


def _find_stall(engine: Engine, detector: StallDetector) -> str | None:
    try:
        metrics = engine.metrics(_METRICS_TIMEOUT_S)
    except EngineTimeoutError:
        return detector.add_timeout(time.monotonic())
    except EngineError:
        metrics = None
    detector.reset_timeouts()
    return detector.add_metrics(metrics, time.monotonic())


class Fragmentation:
    def __init__(self) -> None:
        self._fragmented_at_s: float | None = None

    def is_new(self, blocks: FreeBlocks, now_s: float) -> bool:
        last_s = self._fragmented_at_s
        if blocks.is_fragmented:
            self._fragmented_at_s = now_s
            return last_s is None or now_s - last_s >= _UNFRAGMENTED_S
        if blocks.is_recovered:
            self._fragmented_at_s = None
        return False


def _watch_sensors(release: Release, paths: Paths, stop: threading.Event) -> None:
    alarms, fragmentation = sensors.GpuAlarms(release.watch), Fragmentation()
    sampled_s, last_message = float("-inf"), None
    while not stop.is_set():
        if time.monotonic() - sampled_s >= _SENSORS_INTERVAL_S:
            sampled_s = time.monotonic()
            if reason := compile_cache.size_problem(release, Host(paths)):
                kill_engine(release, "cache", reason, None, paths)
            for kind, text in alarms.events(sensors.read()):
                record_event(release, kind, text, paths)
            blocks = read_free_blocks()
            if blocks is not None and fragmentation.is_new(blocks, sampled_s):
                text = f"memory is fragmented: {blocks}; reboot the host before the next start"
                record_event(release, FRAGMENTED, text, paths)
        last_message = _update_gateway(release, paths, last_message)
        stop.wait(release.watch.interval_s)


def _update_gateway(release: Release, paths: Paths, last_message: str | None) -> str | None:
    """Reload the gateway if an address changed; record a message that differs from the last."""
    try:
        message = gateway.apply_address_change(release.service, paths)
    except (HostToolError, OSError, subprocess.SubprocessError) as error:
        # The gateway has exited or hangs.
        message = str(error)
    if message is not None and message != last_message:
        record_event(release, "gateway", message, paths)
    return message


def kill_engine(release: Release, kind: str, reason: str, pidfd: int | None, paths: Paths) -> None:
    record_soon(release, kind, f"{reason}; killing the engine", paths)
    problem = container.kill_container(release.container, pidfd)
    ensure_unit_stops(problem, release, paths)


def record_soon(release: Release, kind: str, text: str, paths: Paths) -> None:
    """Record an event in a thread, because a slow disk must not delay a kill."""
    event = (release, kind, text, paths)
    writer = threading.Thread(target=record_event, args=event, daemon=True)
    writer.start()
    writer.join(_EVENT_WAIT_S)


def ensure_unit_stops(problem: str, release: Release, paths: Paths) -> None:
    """Kill the unit if it is still active after the engine was killed.

    If there was a ``problem`` with killing the engine, kill the unit at once. A unit that stops
    by itself also ends this process.
    """
    if not problem:
        time.sleep(_UNIT_STOP_TIMEOUT_S)
        problem = f"the unit is still active after {_UNIT_STOP_TIMEOUT_S:.0f} s"
    record_soon(release, KILLED, f"{problem}; killing the unit", paths)
    systemd.systemctl("kill", "--signal=KILL", release.serve_unit)
