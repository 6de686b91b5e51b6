"""The record of a rollout, written at every step and polled by controllers."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from spark_contract.records import Request, Rollout
from spark_contract.release import Release
from spark_contract.status import RunningRollout, StartedRollout
from spark_contract.tool import ERROR, PHASE
from spark_contract.units import SWITCH

from spark_host.system.host import Host
from spark_host.system.programs import log
from spark_host.system.systemd import UnitState, is_queued

_UNIT_FIELDS = ("ActiveState", "Job", "InvocationID", "Result")
_RUNNING = ("activating", "active", "deactivating")


class Record:
    """Writes a rollout's progress to a file; continues the file of a killed run."""

    def __init__(self, release: Release, host: Host, interrupted: Rollout | None = None):
        self._host = host
        self._path = host.paths.rollout(release.name)
        self._began = host.clock.monotonic()
        self.unwritten: OSError | None = None
        self.data = interrupted or Rollout(
            release=release.name,
            started_at=host.clock.now(),
            boot_id=host.boot_id,
            request=request_id(release.name, host),
            invocation_id=host.invocation_id,
            state="running",
        )

    def set(self, **values: Any) -> None:
        """Change fields; a full disk must not stop a rollout."""
        self.data = replace(self.data, **values)
        self.unwritten = None
        try:
            self._host.disk.write(self._path, self.data)
        except OSError as error:
            log(f"cannot write the state of the rollout: {error}")
            self.unwritten = error

    def report(self, text: str) -> None:
        log(text)
        self.set(progress=text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        log(f"{PHASE}{name}")
        self.set(phase=name, progress=None)
        start = self._host.clock.monotonic()
        try:
            yield
        finally:
            self._add_time(name, start)

    def _add_time(self, name: str, since: float) -> None:
        seconds = round(self._host.clock.monotonic() - since, 3)
        self.data = replace(self.data, times_s={**self.data.times_s, name: seconds})

    def end(self, state: str, serving: str | None) -> None:
        self._add_time("total", self._began)
        ended_at = self._host.clock.now()
        self.set(state=state, phase="done", serving=serving, ended_at=ended_at, progress=None)
        reason = self.data.reason
        log(f"{state}: serving {serving or 'nothing'}" + (f"; {reason}" if reason else ""))


def begin(name: str, host: Host) -> StartedRollout:
    """Start a rollout, or join a running rollout to the same release."""
    host.disk.load_release(name, host.paths)
    unit = SWITCH.unit(name)
    with host.disk.locked(host.paths.run / "begin.lock", wait=True):
        if _is_running(host.units.state(unit, *_UNIT_FIELDS)):
            return StartedRollout(name, request_id(name, host), joined=True)
        request = Request(uuid.uuid4().hex, host.clock.now())
        # An earlier record would look like this rollout's result.
        host.disk.remove(host.paths.rollout(name))
        host.disk.write(host.paths.request(name), request)
        host.units.reload()
        host.units.start_in_background(unit)
    return StartedRollout(name, request.id, joined=False)


def request_id(name: str, host: Host) -> str | None:
    request = host.disk.read(Request, host.paths.request(name))
    return request.id if request else None


def poll(name: str, host: Host, request: str | None = None) -> Rollout:
    """Return the state of the last rollout to a release.

    Ignore records of another release, request or run of the unit.
    """
    unit = host.units.state(SWITCH.unit(name), *_UNIT_FIELDS)
    running = _is_running(unit)
    record = host.disk.read(Rollout, host.paths.rollout(name))
    if record is not None and _belongs_to(record, name, unit if running else {}, request):
        is_interrupted = record.state == "running" and not running
        return replace(record, state="interrupted") if is_interrupted else record
    if request is None or running:
        return Rollout(name)
    # A run that failed before it wrote a record left an error in the journal.
    run = unit.get("InvocationID")
    lines = host.units.journal(run, SWITCH.unit(name), lines=20) if run else []
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    result = unit.get("Result") or unit.get("ActiveState", "inactive")
    reason = errors[-1] if errors else f"{SWITCH.unit(name)} did not run ({result})"
    return Rollout(name, state="not-started", failed_phase="begin", reason=reason)


def running_rollout(name: str, unit: UnitState, host: Host) -> RunningRollout | None:
    if not _is_running(unit):
        return None
    record = host.disk.read(Rollout, host.paths.rollout(name))
    if record is None or not _belongs_to(record, name, unit, None):
        request = host.disk.read(Request, host.paths.request(name))
        return RunningRollout(name, request.at if request else "", phase=None)
    if record.state != "running":
        return None
    return RunningRollout(name, record.started_at, record.phase)


def _is_running(unit: UnitState) -> bool:
    return unit.get("ActiveState") in _RUNNING or is_queued(unit)


def _belongs_to(record: Rollout, name: str, unit: UnitState, request: str | None) -> bool:
    run = unit.get("InvocationID")
    is_other_run = run and record.invocation_id and run != record.invocation_id
    return record.release == name and request in (None, record.request) and not is_other_run
