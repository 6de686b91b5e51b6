"""The steps of a rollout, and protocols for the parts of a host that they use."""

import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from spark_contract.machine import BOOT_ID
from spark_contract.paths import Paths
from spark_contract.records import Proof
from spark_contract.release import READY, Release, parse_service
from spark_contract.tool import LIMIT, PHASE, WAITED, HostToolError
from spark_contract.units import SERVE

from spark_host.check import runner, speed
from spark_host.engine import logs
from spark_host.engine import serve as serve_engines
from spark_host.engine.client import EngineError, EngineTimeoutError
from spark_host.gateway import gateway as real_gateway
from spark_host.records import boot
from spark_host.rollout.record import Record
from spark_host.system import cluster
from spark_host.system.host import Host as SystemHost
from spark_host.system.host import record_event
from spark_host.system.programs import Report, log
from spark_host.system.systemd import UnitState, is_queued

_REPORT_INTERVAL_S = 5.0
_TAIL_LINES = 200
_STOP_TIMEOUT_S = 1800.0


# Modules implement these protocols; tests implement them with a simulation.


class Engines(Protocol):
    def find_artifact_problem(self, release: Release) -> HostToolError | None: ...
    def find_problem(self, release: Release, paths: Paths) -> HostToolError | None: ...
    def make_room(self, release: Release, host: SystemHost, report: Report) -> None: ...
    def count_unfinished(self, release: Release, paths: Paths) -> float: ...


class Gateway(Protocol):
    def find_problem(self, release: Release, paths: Paths) -> HostToolError | None: ...
    def start_or_reload(self, release: Release, paths: Paths) -> None: ...
    def wait_until_listening(self, service: str, paths: Paths) -> None: ...
    def close_traffic(self, service: str, paths: Paths) -> None: ...
    def open_traffic(self, release: Release, paths: Paths) -> None: ...


class Check(Protocol):
    def full(self, release: Release, host: SystemHost, report: Report) -> Proof: ...
    def read_versions(self) -> dict[str, str]: ...
    def speed(self, release: Release, paths: Paths, report: Report) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Host(SystemHost):
    engines: Engines = serve_engines
    gateway: Gateway = real_gateway
    check: Check = runner


def this_host(paths: Paths) -> Host:
    boot_id = Path(BOOT_ID).read_text().strip()
    run, status = os.environ.get("INVOCATION_ID"), os.environ.get("EXIT_STATUS")
    return Host(paths, boot_id=boot_id, invocation_id=run, exit_status=status)


class TrialError(Exception):
    """The candidate failed to start, or failed the check."""


# Errors that any step may raise.
FAILURES = (TrialError, HostToolError, OSError, subprocess.SubprocessError)


def is_proven(release: Release, host: Host) -> bool:
    if not host.units.is_active(release.serve_unit):
        return False
    invocation = host.units.read_invocation_id(release.serve_unit)
    last = boot.read_proof(release.name, host)
    versions = host.check.read_versions()
    return boot.unproven_reason(last, release.digest, invocation, versions) is None


def replace_running(release: Release, old: Release | None, host: Host, record: Record) -> None:
    """Stop the running release; then start, check and activate the new release."""
    running = host.release(boot.active_release(release.service, host)) or old
    with record.phase("drain"):
        host.gateway.close_traffic(release.service, host.paths)
        if running is not None:
            drain(running, host, record)
    with record.phase("stop"):
        for unit in host.units.list_units(SERVE.unit("*")):
            if parse_service(SERVE.instance(unit)) == release.service:
                error = stop(unit, host)
                if error and host.units.is_active(unit):
                    raise error
    with record.phase("memory"):
        host.engines.make_room(release, host, record.report)
    with record.phase("start"):
        boot.allow_start(release.service, host)
        boot.remove_stale_link(release, host)
        start(release, host, record)
    with record.phase("check"):
        check(release, host, record)
    activate(release, host, record)


def activate(release: Release, host: Host, record: Record) -> None:
    """Open traffic, enable the release at boot and measure the speed."""
    is_worker = cluster.is_worker(release, host.paths)
    with record.phase("open"):
        open_traffic(release, host)
        if not is_worker:
            host.gateway.wait_until_listening(release.service, host.paths)
    with record.phase("enable"):
        boot.enable_only(release, host)
    if is_worker:  # only the head answers requests
        return
    try:
        measure_speed(release, host, record)
    except FAILURES as error:
        record.set(bench=(f"the speed was not measured: {error}",))


def measure_speed(release: Release, host: Host, record: Record) -> None:
    """Measure the speed unless it is known for the installed versions; report a slowdown."""
    last = boot.read_proof(release.name, host)
    if last is None or last.last_full is None or not boot.is_bench_due(release, last):
        return
    with record.phase("bench"):
        before = boot.read_earlier_bench(release, host)
        try:
            bench = host.check.speed(release, host.paths, record.report)
        except speed.NotMeasuredError as error:
            record.set(bench=(str(error),))
            return
        now = {**bench, "release": release.name, "versions": last.last_full.versions}
        result = speed.add_comparison(release, now, before)
        host.disk.write(host.paths.proof(release.name), replace(last, bench=result))
        record.set(bench=tuple(speed.describe(result)))
        hints = " or ".join(result["revert"]) or "none known"
        for item in result["worse"]:
            record_event(release, "slower", f"{item['text']}; to revert: {hints}", host.paths)


def open_traffic(release: Release, host: Host) -> None:
    if not cluster.is_worker(release, host.paths):
        host.gateway.start_or_reload(release, host.paths)
        # If the engine dies after this line, the restart closes traffic until the next check.
        if not host.units.is_active(release.serve_unit):
            raise TrialError(f"{release.serve_unit} stopped after its check")
        host.gateway.open_traffic(release, host.paths)


def drain(old: Release, host: Host, record: Record) -> None:
    """Wait until in-flight requests have finished, but at most the release's ``drain_s``."""
    deadline = host.clock.monotonic() + old.timeouts.drain_s
    if cluster.is_worker(old, host.paths):
        # A worker must not stop before the head, because in-flight requests need both. A stopped
        # head is a missing member.
        deadline += old.timeouts.stop_s
        while not cluster.missing_members(old, host.paths) and host.clock.monotonic() < deadline:
            host.clock.sleep(0.2)
        return
    reported = 0.0
    while host.clock.monotonic() < deadline:
        try:
            requests = host.engines.count_unfinished(old, host.paths)
            progress = f"requests={requests:.0f}"
        except EngineTimeoutError:  # the engine is busy, probably with unfinished requests
            requests, progress = 1, "no response from the engine"
        except EngineError:
            return
        if requests <= 0:
            return
        if host.clock.monotonic() - reported >= _REPORT_INTERVAL_S:
            reported = host.clock.monotonic()
            record.report(f"{PHASE}drain {progress} left_s={deadline - reported:.0f}")
        host.clock.sleep(0.2)
    limit_s = old.timeouts.drain_s
    record.report(f"{PHASE}drain aborting the requests still running after {limit_s:.0f} s")


def stop(unit: str, host: Host) -> HostToolError | None:
    try:
        host.units.stop(unit, _STOP_TIMEOUT_S)
    except HostToolError as error:
        log(str(error))
        return error
    return None


def start(release: Release, host: Host, record: Record) -> None:
    unit = release.serve_unit
    host.units.start_in_background(unit)
    began = reported = host.clock.monotonic()
    while True:
        state = host.units.state(unit, "ActiveState", "SubState", "Job", "Result", "InvocationID")
        active = state.get("ActiveState")
        if active == "active":
            return
        has_ended = active in ("inactive", "failed") and not is_queued(state)
        if has_ended or state.get("SubState") == "auto-restart":
            record.set(log_tail=read_log_tail(release, host))
            raise TrialError(_describe_start_failure(release, state, host))
        if host.clock.monotonic() - reported >= _REPORT_INTERVAL_S:
            reported = host.clock.monotonic()
            run = state.get("InvocationID", "")
            step = _step_text(host.units.journal(run, unit, lines=_TAIL_LINES))
            record.report(f"{PHASE}start {WAITED}{reported - began:.0f} {step}".rstrip())
        host.clock.sleep(0.25)


def _step_text(lines: list[str]) -> str:
    """Return the text of the last progress line, without phase and times."""
    fields = next((line for line in reversed(lines) if line.startswith(PHASE)), "").split()
    return " ".join(field for field in fields if not field.startswith((PHASE, WAITED, LIMIT)))


def _describe_start_failure(release: Release, state: UnitState, host: Host) -> str:
    last = boot.read_proof(release.name, host)
    failure = f"{release.serve_unit} did not start ({state.get('Result')})"
    if last and not last.ok and last.invocation_id == state.get("InvocationID"):
        failure = _describe_failures(last)
        became_ready = READY not in (finding.name for finding in last.failed)
        if became_ready:  # then the log does not explain the failure
            return failure
    return "; ".join(filter(None, [failure, logs.error_message(read_log_tail(release, host))]))


def check(release: Release, host: Host, record: Record) -> None:
    result = host.check.full(release, host, record.report)
    warnings = (f"{finding.name}: {finding.detail}" for finding in result.warnings)
    record.set(warnings=tuple(warnings))
    if not result.ok:
        record.set(log_tail=read_log_tail(release, host))
        raise TrialError(_describe_failures(result))


def _describe_failures(result: Proof) -> str:
    return "; ".join(f"check {finding.name}: {finding.detail}" for finding in result.failed[:3])


def read_log_tail(release: Release, host: Host) -> tuple[str, ...]:
    invocation = host.units.read_invocation_id(release.serve_unit) or ""
    return tuple(host.units.journal(invocation, release.serve_unit, lines=_TAIL_LINES))
