"""Runs the checks of a release and writes the proof."""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_contract import documents
from spark_contract.machine import GIB
from spark_contract.paths import Paths
from spark_contract.records import CacheCount, Finding, Proof
from spark_contract.release import MEMORY, READY, Release
from spark_contract.tool import LAB_STUB_SUFFIX, LIMIT, PHASE, WAITED, HostToolError

from spark_host.check import compare
from spark_host.check import speed as speed_check
from spark_host.check.checks import CHECKS
from spark_host.check.probe import CheckError, Probe
from spark_host.engine import compile_cache, logs
from spark_host.engine.client import Engine, EngineError
from spark_host.engine.logs import StartPhases
from spark_host.gateway import gateway
from spark_host.records import boot, versions
from spark_host.system import cluster, systemd
from spark_host.system.host import Host
from spark_host.system.programs import Report
from spark_host.watch.start_guard import StartGuard

_PROGRESS_INTERVAL_S = 5.0
_PHASE_INTERVAL_S = 1.0
_LEVEL_FLAGS = {f"--{level}": level for level in boot.LEVELS}
_USAGE = "use check [RELEASE] [--quick|--full|--deep] [--json], or see `spark-host help`"


def full(release: Release, host: Host, report: Report) -> Proof:
    return check(release, host, "full", report)


def speed(release: Release, paths: Paths, report: Report) -> dict[str, Any]:
    limit_s = release.check.bench.limit_s if release.check.bench else 0
    bench = speed_check.measure(release, paths, limit_s, report)
    return {**bench, "packages": versions.read_packages()}


read_versions = versions.read


def check(
    release: Release,
    host: Host,
    level: str,
    report: Report,
    invocation_id: str | None = None,
    *,
    at_start: bool = False,
) -> Proof:
    """Check a release's engine, then write and return the proof of the run (default: current run).

    With ``at_start``, the check also guards the host's memory, because no watchdog runs yet.
    """
    guard = StartGuard(release, host.paths) if at_start else None
    with guard or nullcontext():
        run_before = invocation_id or systemd.read_invocation_id(release.serve_unit) or ""
        earlier = boot.read_proof(release.name, host)
        if earlier is not None and earlier.invocation_id != run_before:
            earlier = None
        # The journal may have dropped lines since an earlier check of this run.
        earlier_lines = earlier.load_lines if earlier else ()
        engine = Engine.for_release(release, host.paths)
        probe = Probe(release, engine, lambda: [*earlier_lines, *read_log(release, run_before)])
        # A member that has left does not rejoin the same run.
        had_joined = earlier is not None and earlier.ok
        membership = Membership(release, host.paths, complete=had_joined)
        start_times_s: dict[str, float] = {}
        if cluster.is_worker(release, host.paths):
            findings = _check_worker(membership, level, report)
        else:
            note = compile_cache.compiling_note(release, run_before, host)
            phases = StartPhases(release)
            findings = [_wait_until_ready(probe, report, note, guard, membership, phases)]
            if findings[0].ok and guard:
                phases.update(probe.read_log(), findings[0].seconds)
                start_times_s = phases.durations_s(findings[0].seconds)
            if findings[0].ok:
                findings += _run_checks(probe, level, report)
    if guard is not None:
        findings.insert(0, _memory_finding(guard, ready=findings[0].ok))
        report(_describe(findings[0]))
    run_after = invocation_id or systemd.read_invocation_id(release.serve_unit) or ""
    if run_after != run_before:
        detail = "the engine was restarted during the check"
        findings.append(Finding("same run", False, detail, 0.0))
        report(_describe(findings[-1]))
    parts = {**versions.read(), **versions.release_versions(release)}
    result = Proof(
        release=release.name,
        digest=release.digest,
        invocation_id=run_before,
        level=level,
        ok=all(finding.ok or finding.severity == "warn" for finding in findings),
        checked_at=host.clock.now(),
        checks=tuple(findings),
        versions=parts,
        engine={"version": probe.engine_version},
        portable=release.check.portable,
        stubbed=tuple(sorted(key for key, value in parts.items() if LAB_STUB_SUFFIX in value)),
        start_memory=guard.start_memory if guard else None,
        start_times_s=start_times_s,
        load_lines=tuple(dict.fromkeys(probe.load_lines)),
        kv_cache=_read_cache_count(probe) if findings[0].ok else None,
    )
    write_proof(result, host, report)
    if at_start and membership.timed_out:
        # Waiting for a host that is off must not use up the start limit.
        systemd.reset_failed(release.serve_unit)
    return result


def _check_worker(membership: "Membership", level: str, report: Report) -> list[Finding]:
    """Wait for the head instead of sending requests, which only the head answers."""
    findings = [wait_until_joined(membership, report)]
    if findings[0].ok and level != "quick":
        findings.append(wait_for_head(membership, report))
    for finding in findings:
        report(_describe(finding))
    return findings


def write_proof(result: Proof, host: Host, report: Report) -> None:
    """Write the proof; on a full disk, report the error and remove the proof of a failed check."""
    try:
        boot.write_proof(result, host)
    except OSError as error:
        report(f"cannot write the proof: {error}")
        if not result.ok:
            host.disk.remove(host.paths.proof(result.release))


def read_log(release: Release, invocation_id: str) -> list[str]:
    """Return the journal of an engine run; without systemd, read the file SPARK_ENGINE_LOG."""
    path = os.environ.get("SPARK_ENGINE_LOG")
    if path is not None:
        return Path(path).read_text(errors="replace").splitlines()
    return systemd.journal(invocation_id, release.serve_unit)


def _read_cache_count(probe: Probe) -> CacheCount | None:
    messages = list(logs.startup_messages(probe.read_log()))
    tokens = logs.kv_cache_tokens(messages)
    fixed_bytes = probe.release.engine.kv_cache_bytes
    size_bytes = fixed_bytes or logs.sizes_bytes(messages).get("kv_cache")
    return CacheCount(tokens, size_bytes) if tokens and size_bytes else None


def _run_checks(probe: Probe, level: str, report: Report) -> list[Finding]:
    with suppress(EngineError):
        probe.metrics_before = probe.engine.metrics()
    rank = boot.LEVELS.index(level)
    findings = []
    for item in CHECKS:
        if boot.LEVELS.index(item.level) > rank or not item.applies(probe.plan):
            continue
        start = time.monotonic()
        probe.deadline_s = start + probe.plan.timeout_s
        ok, severity = True, item.severity
        try:
            detail = item.run(probe)
        except CheckError as error:
            ok, detail, severity = False, str(error), error.severity or item.severity
        seconds = round(time.monotonic() - start, 3)
        findings.append(Finding(item.name, ok, detail, seconds, severity))
        report(_describe(findings[-1]))
        if probe.is_out_of_time and not ok and severity == "must":
            report("skipping the remaining checks: the engine is too slow")
            break
    return findings


def _memory_finding(guard: StartGuard, *, ready: bool) -> Finding:
    if guard.kill_reason is not None:
        return Finding(MEMORY, False, guard.kill_reason, 0.0)
    failures, fatal = guard.read_driver_failures(ready=ready)
    if fatal:
        fix = "reboot the host, unless the engine's log shows another cause"
        return Finding(MEMORY, False, f"{failures}; fix: {fix}", 0.0)
    memory = guard.start_memory
    if memory is None:
        return Finding(MEMORY, False, "not measured", 0.0)
    lowest, floor = memory.lowest_bytes / GIB, memory.floor_bytes / GIB
    text = f"available memory stayed at or above {lowest:.1f} GiB during startup "
    text += f"(lowest after {memory.after_s:.0f} s; minimum allowed {floor:.1f} GiB)"
    suffix = f"; {failures}" if failures else ""
    return Finding(MEMORY, True, text + suffix, 0.0)


@dataclass(slots=True)
class Membership:
    release: Release
    paths: Paths
    began_s: float = field(default_factory=time.monotonic)
    complete: bool = False
    timed_out: bool = False  # a member did not join, so no weights were loaded

    def problem(self) -> str | None:
        """Return why the cluster cannot serve: a member left or did not join in time."""
        members = self.release.cluster
        missing = cluster.describe_missing(self.release, self.paths)
        if members is None or not missing:
            self.complete = True
        elif self.complete:
            return f"{missing} left the cluster"
        elif time.monotonic() - self.began_s > members.join_s:
            self.timed_out = True
            return f"{missing} did not join within {members.join_s:.0f} s"
        return None


_Verdict = tuple[bool, str]  # whether the check passed, and the detail


def _wait(
    name: str,
    phase: str,
    poll: Callable[[float], _Verdict | None],
    report: Report,
    describe: Callable[[float], str],
) -> Finding:
    """Poll until there is a verdict, and report progress."""
    began = reported = time.monotonic()
    while True:
        waited = time.monotonic() - began
        if (verdict := poll(waited)) is not None:
            return Finding(name, *verdict, round(waited, 3))
        if time.monotonic() - reported >= _PROGRESS_INTERVAL_S:
            reported = time.monotonic()
            report(f"{PHASE}{phase} {WAITED}{waited:.0f} {describe(waited)}")
        time.sleep(0.2 if waited < 10 else 1.0)


def wait_until_joined(membership: Membership, report: Report) -> Finding:
    def poll(_: float) -> _Verdict | None:
        if problem := membership.problem():
            return False, problem
        return (True, "this host has joined the head's cluster") if membership.complete else None

    return _wait("joined", "join", poll, report, lambda _: "joining the head")


def wait_for_head(membership: Membership, report: Report) -> Finding:
    """Wait until the head has verified the release; then the watchdog accepts connections."""
    release = membership.release
    limit_s = release.timeouts.start_s + 2 * release.check.timeout_s

    def poll(waited: float) -> _Verdict | None:
        if problem := membership.problem():
            return False, problem
        members = release.cluster
        if members is None or cluster.responds(members.head, members, refusal_counts=False):
            return True, "the head has verified the release"
        message = f"the head did not verify the release within {limit_s:.0f} s"
        return (False, message) if waited > limit_s else None

    return _wait("head", "head", poll, report, lambda _: "waiting for the head")


def _wait_until_ready(
    probe: Probe,
    report: Report,
    note: str,
    guard: StartGuard | None,
    membership: Membership,
    phases: StartPhases,
) -> Finding:
    limit_s = probe.release.timeouts.start_s
    reason = ""

    def poll(waited: float) -> _Verdict | None:
        nonlocal reason
        if waited - phases.updated_s >= _PHASE_INTERVAL_S:
            phases.update(probe.read_log(), waited)
        try:
            status = probe.engine.get("/health", 5).status
            if status == 200:
                with suppress(EngineError):
                    version = probe.engine.get("/version", 5).json().get("version", "")
                    probe.engine_version = str(version)
                return True, "the engine responds"
            reason = f"/health returned HTTP {status}"
        except EngineError as error:
            reason = str(error)
        if failure := _find_start_failure(probe.release, guard, membership):
            return False, failure
        return (False, f"not ready after {limit_s:.0f} s: {reason}") if waited > limit_s else None

    def progress(waited: float) -> str:
        text = "; ".join(filter(None, [phases.text(waited), note]))
        return f"{LIMIT}{limit_s:.0f} {text}"

    finding = _wait(READY, "load", poll, report, progress)
    if not finding.ok:
        report(_describe(finding))
    return finding


def _find_start_failure(
    release: Release, guard: StartGuard | None, membership: Membership
) -> str | None:
    if guard and guard.kill_reason:
        return "the engine was killed"
    if problem := membership.problem():
        return problem
    if "SPARK_ENGINE_LOG" in os.environ:
        return None
    unit = systemd.state(release.serve_unit, "ActiveState", "MainPID", "Result")
    is_up = unit.get("ActiveState") in ("active", "activating", "reloading")
    if is_up and unit.get("MainPID", "0") not in ("0", ""):
        return None
    return f"the engine exited before it was ready ({release.serve_unit}: {unit.get('Result')})"


def _describe(finding: Finding) -> str:
    verdict = "ok  " if finding.ok else {"must": "FAIL", "warn": "warn"}[finding.severity]
    return f"{verdict} {finding.name}: {finding.detail} ({finding.seconds:.2f} s)"


def main(args: list[str], paths: Paths) -> int:
    """Run ``check [RELEASE] [--quick|--full|--deep] [--json] [--at-start]``, or compare answers."""
    host = Host(paths)
    if args[:1] in (["--record"], ["--compare"]):
        return compare.main(args, host)
    flags = {arg for arg in args if arg.startswith("--")}
    names = [arg for arg in args if not arg.startswith("--")]
    unknown = flags - {*_LEVEL_FLAGS, "--json", "--at-start"}
    if unknown or len(names) > 1:
        raise HostToolError("check", f"invalid arguments {sorted(unknown) or names}", _USAGE, 2)
    release = host.disk.load_release(names[0] if names else boot.only_active_release(host), paths)
    levels = [level for flag, level in _LEVEL_FLAGS.items() if flag in flags]
    level = levels[-1] if levels else "full"
    at_start, as_json = "--at-start" in flags, "--json" in flags
    log = functools.partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
    result = check(release, host, level, log, at_start=at_start)
    if as_json:
        json.dump(documents.to_plain(result), sys.stdout, indent=1)
        print()
    else:
        failed = ", ".join(finding.name for finding in result.failed)
        warned = ", ".join(finding.name for finding in result.warnings)
        verdict = f"failed: {failed}" if failed else "proven"
        verdict += f" (warnings: {warned})" if warned else ""
        print(f"{release.name}: {level} check {verdict}", flush=True)
    may_open = at_start and result.ok and not cluster.is_worker(release, paths)
    if may_open and boot.opens_at_start(release, host):
        gateway.open_traffic(release, paths)
    return 0 if result.ok else 1
