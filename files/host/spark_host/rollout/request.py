"""A rollout as others see it: asked for once, and followed under its id.

What happens in between is in ``rollout.py`` and belongs to systemd alone.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

from spark_contract.errors import ERROR
from spark_contract.records import Request, Rollout
from spark_contract.status import Begun, UnderWay
from spark_contract.units import SWITCH

from spark_host.system.host import Host
from spark_host.system.systemd import UnitState

_UNIT_FIELDS = ("ActiveState", "Job", "InvocationID", "Result")
_UNDER_WAY = ("activating", "active", "deactivating")


def begin(name: str, host: Host) -> Begun:
    """Ask systemd for the change to a release; return the id its record will carry.

    A change to this release that is under way is joined, not started again.
    """
    host.disk.load(name, host.paths)
    unit = SWITCH.of(name)
    if _is_running(host.units.state(unit, *_UNIT_FIELDS)):
        return Begun(name, request_of(name, host), joined=True)
    request = Request(uuid.uuid4().hex, host.clock.now())
    # What an earlier change left would read as the outcome of this one.
    host.disk.remove(host.paths.rollout(name))
    host.disk.write(host.paths.request(name), request)
    host.units.reload()
    host.units.begin(unit)
    return Begun(name, request.id, joined=False)


def request_of(name: str, host: Host) -> str | None:
    """Return the id under which the rollout of a release was last asked for."""
    found = host.disk.read(Request, host.paths.request(name))
    return found.id if found else None


def poll(name: str, host: Host, request: str | None = None) -> Rollout:
    """Return how the change to a release stands.

    A record of another release, of another request or of an earlier run of the unit says nothing
    of this change; with no request any one counts.
    """
    unit = host.units.state(SWITCH.of(name), *_UNIT_FIELDS)
    running = _is_running(unit)
    record = host.disk.read(Rollout, host.paths.rollout(name))
    if record is not None and _is_of(record, name, unit if running else {}, request):
        cut_off = record.state == "running" and not running
        return replace(record, state="interrupted") if cut_off else record
    if request is None or running:
        return Rollout(name)
    ended = unit.get("Result") or unit.get("ActiveState", "inactive")
    why = _last_words(name, unit, host) or f"{SWITCH.of(name)} did not run ({ended})"
    return Rollout(name, state="not-started", failed_phase="begin", reason=why)


def under_way(name: str, unit: UnitState, host: Host) -> UnderWay | None:
    """Return the change to a release as far as its unit, which is known already, carries it out.

    A unit whose record of this run has ended only ends, too.
    """
    if not _is_running(unit):
        return None
    record = host.disk.read(Rollout, host.paths.rollout(name))
    if record is None or not _is_of(record, name, unit, None):
        asked = host.disk.read(Request, host.paths.request(name))
        return UnderWay(name, asked.at if asked else "", None)
    if record.state != "running":
        return None
    return UnderWay(name, record.started_at, record.phase)


def _is_running(unit: UnitState) -> bool:
    return unit.get("ActiveState") in _UNDER_WAY or unit.get("Job", "0") not in ("", "0")


def _is_of(record: Rollout, name: str, unit: UnitState, request: str | None) -> bool:
    """Return whether a record is of this release, request and run, as far as these are known."""
    run = unit.get("InvocationID")
    return (
        record.release == name
        and request in (None, record.request)
        and not (run and record.invocation_id and run != record.invocation_id)
    )


def _last_words(name: str, unit: UnitState, host: Host) -> str | None:
    """Return the error with which a run ended before it could write a record, if it said one."""
    run = unit.get("InvocationID")
    said = host.units.journal(run, SWITCH.of(name), lines=20) if run else []
    return next((line[len(ERROR) :] for line in reversed(said) if line.startswith(ERROR)), None)
