"""The watch: sees a wedged engine, a starving host and a hot GPU; acts within the start limits.

It only ever kills the engine's container. systemd then restarts the unit after ``RestartSec``,
counts the start, and gives up at the start limit; so the loop ends and the host stays reachable.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from dataclasses import dataclass

from spark_contract import documents, files
from spark_contract.errors import HostToolError
from spark_contract.machine import FreeBlocks
from spark_contract.paths import Paths
from spark_contract.records import Event
from spark_contract.release import FRAGMENTED, KILLED, STALLED, STARVING, Release, Watch

from spark_host.engine import container
from spark_host.engine.client import Engine, EngineError, SilentError
from spark_host.engine.memory import Floor, available_bytes, read_free_blocks
from spark_host.engine.metrics import Metrics
from spark_host.gateway import gateway
from spark_host.system import cluster, systemd
from spark_host.system.host import load_release
from spark_host.watch import sensors
from spark_host.watch.cluster import Together
from spark_host.watch.sensors import Thermometer

_EVENTS_KEPT = 1000
_UNFRAGMENTED_S = 600.0  # without fragmentation: the next one is reported
_SENSORS_EVERY_S = 20.0  # nvidia-smi starts anew each time, and heat is slow
_ANSWER_S = 5.0
_WORKER_S = 0.5
# So many in a row, beside the time: a watch that was itself held up may look once in a long while.
_SILENT_LOOKS = 3
_NOTE_S = 2.0
_UNIT_ENDS_S = 20.0
_writing = threading.Lock()


@dataclass(slots=True)
class Judge:
    """Turns looks at the engine into a verdict; keeps the little history that takes."""

    plan: Watch
    moved_at_s: float | None = None
    last_progress: tuple[float, ...] = ()
    silent_since_s: float | None = None
    silent_looks: int = 0

    def silent(self, now_s: float) -> str | None:
        """Take note that the engine let a question for its metrics wait; return why it is wedged.

        No engine that starts is looked at: systemd starts the watch once the unit has passed its
        check, which guards the memory until then (guard.py). The metrics come from the process
        that sends every token to its client, so nobody is served meanwhile; a box under load
        answers late, but not for as long as a stall takes.
        """
        if self.silent_since_s is None:
            self.silent_since_s = now_s
        self.silent_looks += 1
        silent_s = now_s - self.silent_since_s
        if silent_s < self.plan.stall_s or self.silent_looks < _SILENT_LOOKS:
            return None
        return f"the engine listens, but gave no answer for {silent_s:.0f} s"

    def answered(self) -> None:
        """Forget the silence: the engine answered, or nobody listens any more."""
        self.silent_since_s, self.silent_looks = None, 0

    def stalled(self, metrics: Metrics | None, now_s: float) -> str | None:
        """Return why the engine counts as wedged, or ``None``.

        ``None`` for metrics means that nobody listens or that the answer is an error, which says
        nothing: a unit whose engine has died is systemd's business.
        """
        if metrics is None:
            return None
        progress = metrics.progress
        if metrics.running <= 0 or progress != self.last_progress or self.moved_at_s is None:
            self.last_progress, self.moved_at_s = progress, now_s
            return None
        flat_s = now_s - self.moved_at_s
        if flat_s < self.plan.stall_s:
            return None
        return (
            f"{metrics.running:.0f} requests are running, but no token was read or written "
            f"for {flat_s:.0f} s"
        )


def run(name: str, paths: Paths) -> int:
    """Watch a release until its unit ends (systemd stops the watch with it)."""
    release = load_release(name, paths)
    engine = Engine.of(release, paths)
    judge, floor = Judge(release.watch), Floor(release.memory.floor_bytes)
    worker, together = cluster.is_worker(release, paths), Together(release, paths)
    held = None
    over = threading.Event()
    threading.Thread(target=_look_beside, args=(release, paths, over), daemon=True).start()
    together.begin(over)
    try:
        while True:
            if held is None:
                held = container.open_process(release.container)
            reason = floor.broken(available_bytes())
            if reason is not None:
                act(release, STARVING, reason, held, paths)
                floor.low_samples = 0
            if together.lost is not None:
                # It ran well: its starts are counted against what fails here, not elsewhere.
                systemd.reset(release.serve_unit, _ANSWER_S)
                act(release, "member", together.lost, held, paths)
                together.forget()
            reason = None if worker else _wedged(engine, judge)
            if reason is not None:
                act(release, STALLED, reason, held, paths)
                judge.moved_at_s = None
                judge.answered()
            # A worker is watched from when it joined: its weights are loaded after that.
            time.sleep(_WORKER_S if worker else release.watch.interval_s)
    finally:
        over.set()


class Fragmentation:
    """Reports fragmentation once while the free blocks stay near the limit."""

    def __init__(self) -> None:
        self._fragmented_at_s: float | None = None

    def begins(self, blocks: FreeBlocks, now_s: float) -> bool:
        """Return whether memory is fragmented for the first time since it recovered."""
        before_s = self._fragmented_at_s
        if blocks.is_fragmented:
            self._fragmented_at_s = now_s
            return before_s is None or now_s - before_s >= _UNFRAGMENTED_S
        if blocks.is_recovered:
            self._fragmented_at_s = None
        return False


def _look_beside(release: Release, paths: Paths, over: threading.Event) -> None:
    """Do what may wait, apart from what may not: these programs hang on a host in trouble."""
    thermometer, looked_s, last = Thermometer(release.watch), float("-inf"), None
    fragmentation = Fragmentation()
    while not over.is_set():
        if time.monotonic() - looked_s >= _SENSORS_EVERY_S:
            looked_s = time.monotonic()
            for kind, text in thermometer.events(sensors.read()):
                event(release, kind, text, paths)
            blocks = read_free_blocks()
            if blocks is not None and fragmentation.begins(blocks, looked_s):
                text = f"memory is fragmented: {blocks}; reboot the host before its next start"
                event(release, FRAGMENTED, text, paths)
        last = _follow_addresses(release, paths, last)
        over.wait(release.watch.interval_s)


def _follow_addresses(release: Release, paths: Paths, last: str | None) -> str | None:
    """Let the gateway take over an address of a bridge or tunnel that came, went or changed.

    Returns what there was to say last, so that the same trouble makes one event.
    """
    try:
        said = gateway.follow(release.service, paths)
    except (HostToolError, OSError, subprocess.SubprocessError) as error:
        # The latter two: a gateway that ends while it is looked at, or that hangs.
        said = str(error)
    if said is not None and said != last:
        event(release, "gateway", said, paths)
    return said


def act(release: Release, kind: str, reason: str, held: int | None, paths: Paths) -> None:
    """Write the event and kill the engine; systemd decides about another start.

    The engine is killed by a handle of its first process; without one docker is asked to.
    """
    text = f"{reason}; the engine is stopped"
    # First, because this watch ends with the engine's unit; but no disk is waited for.
    note = threading.Thread(target=event, args=(release, kind, text, paths), daemon=True)
    note.start()
    note.join(_NOTE_S)
    kill_unit_after(container.kill_container(release.container, held), release, paths)


def kill_unit_after(problem: str, release: Release, paths: Paths) -> None:
    """Kill the unit of an engine that could not be ended, or that goes on without it."""
    if not problem:
        time.sleep(_UNIT_ENDS_S)
        problem = f"its unit goes on after {_UNIT_ENDS_S:.0f} s"
    event(release, KILLED, f"{problem}; killing the unit", paths)
    systemd.systemctl("kill", "--signal=KILL", release.serve_unit)


def event(release: Release, kind: str, text: str, paths: Paths) -> None:
    """Append one event to the file a person can read, and to the journal."""
    path = paths.events(release.service)
    line = documents.plain(Event(files.now(), release.name, kind, text))
    print(f"{kind}: {text}", flush=True)
    try:
        with _writing:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_text().splitlines()[-_EVENTS_KEPT + 1 :] if path.exists() else []
            files.write_text(path, "\n".join([*lines, json.dumps(line)]) + "\n")
    except OSError as error:  # a full disk must not end the watch; the journal has the event
        print(f"event not kept: {error}", flush=True)


def events(service: str, paths: Paths) -> tuple[Event, ...]:
    """Return the last ten events of a service, oldest first."""
    path = paths.events(service)
    lines = path.read_text().splitlines()[-10:] if path.exists() else ()
    return tuple(documents.parse(Event, line) for line in lines)


def _wedged(engine: Engine, judge: Judge) -> str | None:
    """Look at the engine once; return why it counts as wedged, or ``None``."""
    try:
        metrics = engine.metrics(_ANSWER_S)
    except SilentError:
        return judge.silent(time.monotonic())
    except EngineError:
        metrics = None
    judge.answered()
    return judge.stalled(metrics, time.monotonic())
