"""The steps of a rollout: each does one thing to the host and fails with a plain sentence."""

from __future__ import annotations

import subprocess

from spark_contract.errors import HostToolError
from spark_contract.records import Proof
from spark_contract.release import Release, service_of
from spark_contract.tool import PHASE, WAITED
from spark_contract.units import SERVE

from spark_host.check import speed
from spark_host.engine import compile_cache
from spark_host.engine.client import EngineError, SilentError
from spark_host.records import boot, proof
from spark_host.rollout.ports import Host
from spark_host.rollout.record import Record
from spark_host.system import cluster
from spark_host.system.programs import log
from spark_host.system.systemd import UnitState
from spark_host.watch import loop

# It runs when the gateway is open again, so it makes no outage longer; and it undoes nothing,
# because a slower server that answers right is better than none: going back is a person's choice.


def measured(release: Release, host: Host, record: Record) -> None:
    """Measure a proven release unless that was done under these versions; keep the result."""
    kept = proof.read(release.name, host)
    if kept is None or kept.last_full is None or not proof.bench_due(release, kept):
        return
    with record.phase("bench"):
        before = proof.bench_before(release, host)
        try:
            found = host.check.speed(release, host.paths, record.report)
        except speed.NotMeasuredError as error:
            record.set(bench=(str(error),))
            return
        now = {**found, "release": release.name, "versions": kept.last_full.versions}
        result = speed.add_comparison(release, now, before)
        proof.keep_bench(kept, result, host)
        record.set(bench=tuple(speed.describe(result)))
        for item in result["worse"]:
            text = (
                f"{item['text']}; the way back: {' or '.join(result['way_back']) or 'none known'}"
            )
            loop.event(release, "slower", text, host.paths)


_REPORT_S = 5.0
_TAIL_LINES = 40
_STOP_S = 1800.0


class TrialError(Exception):
    """The candidate did not become a proven server; the message is a plain sentence."""


# What a step may end with: a disk can be full and a program can hang in any of them.
FAILURES = (TrialError, HostToolError, OSError, subprocess.SubprocessError)


def is_proven(release: Release, host: Host) -> bool:
    """Return whether a release runs and its proof covers this run."""
    if not host.units.is_active(release.serve_unit):
        return False
    invocation = host.units.invocation(release.serve_unit)
    found = proof.read(release.name, host)
    return proof.why_not(found, release.digest, invocation, host.check.versions()) is None


def replace(release: Release, old: Release | None, host: Host, record: Record) -> None:
    """Put a release in the place of the one that runs, prove it and have it serve."""
    running = host.release(boot.active(release.service, host)) or old
    with record.phase("drain"):
        host.traffic.close(release.service, host.paths)
        if running is not None:
            drain(running, host, record)
    with record.phase("stop"):
        _stop_all(release.service, host)
    with record.phase("memory"):
        host.engines.make_room(release, record.report)
    with record.phase("start"):
        boot.drop_left_link(release, host)
        start(release, host, record)
    with record.phase("check"):
        check(release, host, record)
    take_over(release, host, record)


def take_over(release: Release, host: Host, record: Record) -> None:
    """Have a release that is proven be the one that serves, now and after a boot."""
    worker = cluster.is_worker(release, host.paths)
    with record.phase("open"):
        open_traffic(release, host)
        if not worker:
            host.gateway.wait_until_listening(release.service, host.paths)
    with record.phase("enable"):
        boot.enable_only(release, host)
    if worker:  # what it is asked, its head is asked
        return
    try:
        measured(release, host, record)
    except FAILURES as error:  # a speed that nobody could keep undoes no change
        record.set(bench=(f"no speed was measured: {error}",))


def open_traffic(release: Release, host: Host) -> None:
    """Have the gateway run and let requests through to a release."""
    if cluster.is_worker(release, host.paths):  # the gateway of a cluster is that of its head
        return
    host.gateway.bring_up(release, host.paths)
    host.traffic.open_for(release, host.paths)


def drain(old: Release, host: Host, record: Record) -> None:
    """Return when the engine has answered what it was asked, or its time for that is over."""
    if cluster.is_worker(old, host.paths):
        _wait_for_head(old, host)
        return
    deadline = host.clock.monotonic() + old.timeouts.drain_s
    told = 0.0
    while host.clock.monotonic() < deadline:
        try:
            requests = host.engines.unfinished(old, host.paths)
            left = f"requests={requests:.0f}"
        except SilentError:  # busy, most of all with answers that want to be finished
            requests, left = 1, "no word of the engine"
        except EngineError:
            return
        if requests <= 0:
            return
        if host.clock.monotonic() - told >= _REPORT_S:
            told = host.clock.monotonic()
            record.report(f"{PHASE}drain {left} left_s={deadline - told:.0f}")
        host.clock.sleep(0.2)
    record.report(
        f"{PHASE}drain the limit of {old.timeouts.drain_s:.0f} s passed; requests are cut"
    )


def _wait_for_head(old: Release, host: Host) -> None:
    """Compute on for the head until it has stopped, for answers of its own are computed here."""
    deadline = host.clock.monotonic() + old.timeouts.drain_s + old.timeouts.stop_s
    while not cluster.missing_members(old, host.paths) and host.clock.monotonic() < deadline:
        host.clock.sleep(0.2)


def _stop_all(service: str, host: Host) -> None:
    """Stop the units that must make room; one that goes on is left to serve on."""
    for unit in host.units.listed(SERVE.of("*")):
        if service_of(SERVE.instance(unit)) == service:
            error = stop(unit, host)
            if error and host.units.is_active(unit):
                raise error


def stop(unit: str, host: Host) -> HostToolError | None:
    """Stop a unit; return what systemd had against it."""
    try:
        host.units.stop(unit, _STOP_S)
    except HostToolError as error:
        log(str(error))
        return error
    return None


def start(release: Release, host: Host, record: Record) -> None:
    """Start a release's unit and return once it is active, that is, past its quick check."""
    unit = release.serve_unit
    host.units.begin(unit)
    begun = told = host.clock.monotonic()
    last = ""
    while True:
        state = host.units.state(unit, "ActiveState", "SubState", "Job", "Result", "InvocationID")
        active = state.get("ActiveState")
        if active == "active":
            return
        pending = state.get("Job", "0") not in ("", "0")
        if state.get("SubState") == "auto-restart" or (
            active in ("inactive", "failed") and not pending
        ):
            record.set(log_tail=log_tail(release, host))
            raise TrialError(_why_not_started(release, state, host))
        if host.clock.monotonic() - told >= _REPORT_S:
            told = host.clock.monotonic()
            lines = host.units.journal(state.get("InvocationID", ""), unit, lines=20)
            # The check at the start reports waiting, too; the engine's own words say more.
            said_by_engine = [line.strip() for line in lines if WAITED not in line]
            last = said_by_engine[-1][:160] if said_by_engine else last
            doing = compile_cache.compiling(release, state.get("InvocationID", ""), host)
            record.report(f"{PHASE}start {WAITED}{told - begun:.0f} {doing}last: {last}")
        host.clock.sleep(0.25)


def _why_not_started(release: Release, state: UnitState, host: Host) -> str:
    found = proof.read(release.name, host)
    if found and not found.ok and found.invocation_id == state.get("InvocationID"):
        return _failures(found)
    last = next((line for line in reversed(log_tail(release, host)) if "error" in line.lower()), "")
    return f"{release.serve_unit} did not start ({state.get('Result')}); {last}".rstrip("; ")


def check(release: Release, host: Host, record: Record) -> None:
    """Run the full check on a release that runs."""
    result = host.check.full(release, host, record.report)
    record.set(warnings=tuple(f"{one.name}: {one.detail}" for one in result.warnings))
    if not result.ok:
        record.set(log_tail=log_tail(release, host))
        raise TrialError(_failures(result))


def _failures(result: Proof) -> str:
    return "; ".join(f"{finding.name}: {finding.detail}" for finding in result.failed[:3])


def log_tail(release: Release, host: Host) -> tuple[str, ...]:
    """Return the last lines of a release's last run."""
    invocation = host.units.invocation(release.serve_unit) or ""
    return tuple(host.units.journal(invocation, release.serve_unit, lines=_TAIL_LINES))
