"""Runs the checks a release asks for and writes the proof."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from spark_contract import documents
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.records import CacheCount, Finding, Proof
from spark_contract.release import MEMORY, READY, Release
from spark_contract.tool import PHASE, STAND_IN, WAITED

from spark_host.check import comparing
from spark_host.check.probe import CheckError, Probe
from spark_host.check.questions import together
from spark_host.check.table import CHECKS, Check
from spark_host.engine import compile_cache, logs
from spark_host.engine.client import Engine, EngineError
from spark_host.engine.memory import GIB
from spark_host.gateway import traffic
from spark_host.records import boot, proof
from spark_host.system import members, systemd
from spark_host.system import stored as releases
from spark_host.system.ports import Host
from spark_host.system.programs import Report
from spark_host.watch.guard import StartGuard

_PROGRESS_S = 5.0


def check(
    release: Release,
    host: Host,
    level: str,
    report: Report,
    invocation_id: str | None = None,
    *,
    at_start: bool = False,
) -> Proof:
    """Check a release's engine and keep the proof, which is returned as it was written.

    It is bound to the run that is named, else to the one that systemd names. Of an engine that is
    just being started the host's memory is guarded meanwhile: no watch does that yet.
    """
    guard = StartGuard(release, host.paths) if at_start else None
    with guard or nullcontext():
        before = invocation_id or systemd.invocation(release.serve_unit) or ""
        earlier = _earlier(release, before, host)
        # The journal may have lost what an earlier check of this run found in its log.
        kept = earlier.load_lines if earlier else ()
        probe = Probe(
            release, Engine.of(release, host.paths), lambda: [*kept, *read_log(release, before)]
        )
        # Who joined this run once and is gone by now will not come to it any more.
        had_joined = earlier is not None and earlier.ok
        joining = together.Joining(release, host.paths, complete=had_joined)
        worker = members.is_worker(release, host.paths)
        if worker:
            findings = _of_worker(joining, level, report)
        else:
            doing = compile_cache.compiling(release, before, host)
            findings = [_ready(probe, report, doing, lambda: _stopped(guard) or joining.problem())]
        if findings[0].ok and not worker:
            probe.before = _metrics_or_none(probe)
            findings += _run_all(probe, level, report)
    if guard is not None:
        findings.insert(0, _memory(guard, ready=findings[0].ok))
        report(_line(findings[0]))
    after = invocation_id or systemd.invocation(release.serve_unit) or ""
    if after != before:
        findings.append(Finding("same run", False, "the engine was restarted meanwhile", 0.0))
        report(_line(findings[-1]))
    versions = {**proof.versions(), **proof.parts(release)}
    result = Proof(
        release=release.name,
        digest=release.digest,
        invocation_id=before,
        level=level,
        ok=all(finding.ok or finding.weight == "warn" for finding in findings),
        checked_at=host.clock.now(),
        checks=tuple(findings),
        versions=versions,
        engine={"version": probe.engine_version},
        portable=release.check.portable,
        stubbed=tuple(sorted(key for key, value in versions.items() if STAND_IN in value)),
        start_memory=guard.seen if guard else None,
        load_lines=tuple(dict.fromkeys(probe.load_lines)),
        kv_cache=_counted_cache(probe) if findings[0].ok else None,
    )
    keep(result, host, report)
    if at_start and joining.alone:
        # A member that is switched off for days must find the others waiting, not given up.
        systemd.reset(release.serve_unit)
    return result


def _of_worker(joining: together.Joining, level: str, report: Report) -> list[Finding]:
    """Return what a host that computes for another can prove: the answers are the head's."""
    findings = [together.joined(joining, report)]
    if findings[0].ok and level != "quick":
        findings.append(together.head_proven(joining, report))
    for finding in findings:
        report(_line(finding))
    return findings


def _earlier(release: Release, invocation_id: str, host: Host) -> Proof | None:
    """Return what an earlier check of this run of the engine found."""
    found = proof.read(release.name, host)
    return found if found and found.invocation_id == invocation_id else None


def _counted_cache(probe: Probe) -> CacheCount | None:
    """Return what the engine's log says of its cache, where it says both."""
    said = list(logs.start_messages(probe.read_log()))
    tokens = logs.kv_cache_tokens(said)
    told = probe.release.engine.kv_cache_bytes
    size_bytes = told or logs.sizes_bytes(said).get("kv_cache")
    return CacheCount(tokens, size_bytes) if tokens and size_bytes else None


def keep(result: Proof, host: Host, report: Report) -> None:
    """Write the proof down; on a full disk an engine that answers right serves all the same.

    The next deploy proves again what has no proof; one that does not hold any more has to go.
    """
    try:
        proof.write(result, host)
    except OSError as error:
        report(f"the proof is not kept: {error}")
        if not result.ok:
            host.disk.remove(host.paths.proof(result.release))


def _run_all(probe: Probe, level: str, report: Report) -> list[Finding]:
    rank = proof.LEVELS.index(level)
    findings = []
    for item in CHECKS:
        if proof.LEVELS.index(item.level) > rank or not item.wanted(probe):
            continue
        findings.append(_run_one(item, probe))
        report(_line(findings[-1]))
        if probe.out_of_time and not findings[-1].ok and findings[-1].weight == "must":
            report("the rest is not asked: an engine that takes this long is not sound")
            break
    return findings


def _run_one(item: Check, probe: Probe) -> Finding:
    start = time.monotonic()
    probe.until_s = start + probe.plan.timeout_s
    ok, weight = True, item.weight
    try:
        detail = item.run(probe)
    except CheckError as error:
        ok, detail, weight = False, str(error), error.weight or item.weight
    return Finding(item.name, ok, detail, round(time.monotonic() - start, 3), weight)


def _line(finding: Finding) -> str:
    verdict = "ok  " if finding.ok else {"must": "FAIL", "warn": "warn"}[finding.weight]
    return f"{verdict} {finding.name}: {finding.detail} ({finding.seconds:.2f} s)"


def _stopped(guard: StartGuard | None) -> str | None:
    return "the engine was stopped" if guard and guard.starved else None


def _memory(guard: StartGuard, *, ready: bool) -> Finding:
    """Say how much memory the start left; the first of the findings, for it explains the others."""
    if guard.starved is not None:
        return Finding(MEMORY, False, guard.starved, 0.0)
    failures, fatal = guard.read_driver_failures(ready=ready)
    if fatal:
        fix = "reboot the host, if the engine's log names no other cause"
        return Finding(MEMORY, False, f"{failures}; fix: {fix}", 0.0)
    seen = guard.seen
    text = "not looked at"
    if seen is not None:
        text = (
            f"{seen.lowest_bytes / GIB:.1f} GiB or more were available while it started "
            f"(least after {seen.after_s:.0f} s, floor {seen.floor_bytes / GIB:.1f} GiB)"
        )
        text += failures and f"; {failures}"
    return Finding(MEMORY, seen is not None, text, 0.0)


def _ready(probe: Probe, report: Report, doing: str, ended: Callable[[], str | None]) -> Finding:
    """Wait until the engine listens and is healthy; show what it is doing meanwhile."""
    start = time.monotonic()
    limit_s = probe.release.timeouts.start_s
    told = start
    while True:
        waited = time.monotonic() - start
        try:
            status = probe.engine.get("/health", 5).status
            if status == 200:
                probe.engine_version = _version(probe)
                return Finding(READY, True, "the engine answers", round(waited, 3))
            reason = f"/health answers HTTP {status}"
        except EngineError as error:
            reason = str(error)
        gone = ended() or _unit_gone(probe.release)
        if gone or waited > limit_s:
            what = gone or f"not ready after {limit_s:.0f} s: {reason}"
            finding = Finding(READY, False, what, round(waited, 3))
            report(_line(finding))
            return finding
        if time.monotonic() - told >= _PROGRESS_S:
            told = time.monotonic()
            # Our own lines are in the engine's log, too; they would repeat each other.
            said = (line.strip() for line in reversed(probe.read_log()) if WAITED not in line)
            last = next(filter(None, said), reason)
            so_far = f"{WAITED}{waited:.0f} limit_s={limit_s:.0f}"
            report(f"{PHASE}load {so_far} {doing}last: {last[:160]}")
        time.sleep(0.2 if waited < 10 else 1.0)


def _unit_gone(release: Release) -> str | None:
    if "SPARK_ENGINE_LOG" in os.environ:
        return None
    state = systemd.state(release.serve_unit, "ActiveState", "MainPID", "Result")
    if state.get("ActiveState") in ("active", "activating", "reloading") and state.get(
        "MainPID", "0"
    ) not in ("0", ""):
        return None
    return f"the engine ended before it was ready ({release.serve_unit}: {state.get('Result')})"


def _version(probe: Probe) -> str:
    try:
        return str(probe.engine.get("/version", 5).json().get("version", ""))
    except EngineError:
        return ""


def _metrics_or_none(probe: Probe) -> Any:
    try:
        return probe.engine.metrics()
    except EngineError:
        return None


def read_log(release: Release, invocation_id: str) -> list[str]:
    """Return what this run of the engine printed, from the journal.

    ``SPARK_ENGINE_LOG`` names a file to read instead, for an engine not run by systemd.
    """
    path = os.environ.get("SPARK_ENGINE_LOG")
    if path is not None:
        return Path(path).read_text(errors="replace").splitlines()
    return systemd.journal(invocation_id, release.serve_unit)


def _from_the_call(words: list[str]) -> list[str]:
    """Return words with a file of prompts where its caller is; the launcher works elsewhere."""
    verb, *given = words
    if verb != "--record":
        return words
    where = os.environ.get("SPARK_CALLED_FROM", "")
    return [verb, *(one if one.startswith("--") else os.path.join(where, one) for one in given)]


def main(words: list[str], paths: Paths) -> int:
    """Run ``check [RELEASE] [--quick|--full|--deep] [--json] [--at-start]``, or compare answers."""
    if words[:1] in (["--record"], ["--compare"]):
        return comparing.main(_from_the_call(words), Host(paths))
    flags = {word for word in words if word.startswith("--")}
    given = [word for word in words if not word.startswith("--")]
    unknown = flags - {"--quick", "--full", "--deep", "--json", "--at-start"}
    if unknown or len(given) > 1:
        raise HostToolError(
            "check",
            f"unknown words {sorted(unknown) or given}",
            "check [RELEASE] [--quick|--full|--deep] [--json], check --record [FILE], "
            "check --compare RELEASE",
            2,
        )
    host = Host(paths)
    release = releases.load(given[0] if given else boot.only_active(host), paths)
    level = next((name for name in reversed(proof.LEVELS) if f"--{name}" in flags), "full")
    stream = sys.stderr if "--json" in flags else sys.stdout
    at_start = "--at-start" in flags
    say = functools.partial(print, file=stream, flush=True)
    result = check(release, host, level, say, at_start=at_start)
    if "--json" in flags:
        json.dump(documents.plain(result), sys.stdout, indent=1)
        print()
    else:
        failed = ", ".join(finding.name for finding in result.failed)
        warned = ", ".join(finding.name for finding in result.warnings)
        verdict = f"failed: {failed}" if failed else "proven"
        verdict += f" (warned of: {warned})" if warned else ""
        print(f"{release.name}: {level} check {verdict}", flush=True)
    opens = at_start and result.ok and not members.is_worker(release, paths)
    if opens and boot.opens_at_start(release, host):
        traffic.open_for(release, paths)
    return 0 if result.ok else 1
