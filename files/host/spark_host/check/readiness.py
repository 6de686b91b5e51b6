"""Waits during a check: until the engine is ready, the cluster complete, or the head proven."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from spark_contract.paths import Paths
from spark_contract.records import Finding
from spark_contract.release import READY, Release
from spark_contract.tool import PHASE, WAITED

from spark_host.check.probe import Probe
from spark_host.engine.client import EngineError
from spark_host.system import cluster as clusters
from spark_host.system import systemd
from spark_host.system.programs import Report
from spark_host.watch.start_guard import StartGuard

_PROGRESS_S = 5.0
_POLL_S = 0.5


@dataclass(slots=True)
class Membership:
    release: Release
    paths: Paths
    began_s: float = field(default_factory=time.monotonic)
    complete: bool = False
    alone: bool = False
    """The other members never joined, so no weights were loaded."""

    def problem(self) -> str | None:
        """Return why the start cannot succeed; ``None`` while members may still join."""
        cluster = self.release.cluster
        missing = clusters.missing_names(self.release, self.paths)
        if cluster is None or not missing:
            self.complete = True
        elif self.complete:
            return f"{missing} left the cluster"
        elif time.monotonic() - self.began_s > cluster.join_s:
            self.alone = True
            return f"{missing} did not join within {cluster.join_s:.0f} s"
        return None


def wait_until_joined(membership: Membership, report: Report) -> Finding:

    def poll(_: float) -> tuple[bool, str] | None:
        if problem := membership.problem():
            return False, problem
        return (True, "the rank has joined the head") if membership.complete else None

    return _wait("joined", "join", poll, report)


def wait_for_head(membership: Membership, report: Report) -> Finding:
    """Wait until the head has proven the release and serves it.

    The watchdog there then accepts connections; a head that fails rolls back and leaves.
    """
    release = membership.release
    limit_s = release.timeouts.start_s + 2 * release.check.timeout_s

    def poll(waited: float) -> tuple[bool, str] | None:
        if problem := membership.problem():
            return False, problem
        cluster = release.cluster
        if cluster is None or clusters.can_connect(cluster.head, cluster, if_refused=False):
            return True, "the head is proven and serves"
        if waited > limit_s:
            return False, f"the head was not proven within {limit_s:.0f} s"
        return None

    return _wait("head", "head", poll, report)


def _wait(
    name: str, phase: str, poll: Callable[[float], tuple[bool, str] | None], report: Report
) -> Finding:
    began = reported = time.monotonic()
    while True:
        waited = time.monotonic() - began
        if (result := poll(waited)) is not None:
            return Finding(name, *result, round(waited, 3))
        if time.monotonic() - reported >= _PROGRESS_S:
            reported = time.monotonic()
            report(f"{PHASE}{phase} {WAITED}{waited:.0f}")
        time.sleep(_POLL_S)


def describe(finding: Finding) -> str:
    verdict = "ok  " if finding.ok else {"must": "FAIL", "warn": "warn"}[finding.weight]
    return f"{verdict} {finding.name}: {finding.detail} ({finding.seconds:.2f} s)"


def wait_until_ready(
    probe: Probe, report: Report, note: str, guard: StartGuard | None, membership: Membership
) -> Finding:
    """Wait until the engine is healthy; report the last log line meanwhile."""
    start = reported = time.monotonic()
    limit_s = probe.release.timeouts.start_s
    while True:
        waited = time.monotonic() - start
        try:
            status = probe.engine.get("/health", 5).status
            if status == 200:
                with suppress(EngineError):
                    version = probe.engine.get("/version", 5).json().get("version", "")
                    probe.engine_version = str(version)
                return Finding(READY, True, "the engine answers", round(waited, 3))
            reason = f"/health answers HTTP {status}"
        except EngineError as error:
            reason = str(error)
        failure = _start_failure(probe.release, guard, membership)
        if failure or waited > limit_s:
            detail = failure or f"not ready after {limit_s:.0f} s: {reason}"
            finding = Finding(READY, False, detail, round(waited, 3))
            report(describe(finding))
            return finding
        if time.monotonic() - reported >= _PROGRESS_S:
            reported = time.monotonic()
            # Our own progress lines are in the engine's log, too.
            lines = (line.strip() for line in reversed(probe.read_log()) if WAITED not in line)
            last = next(filter(None, lines), reason)
            report(
                f"{PHASE}load {WAITED}{waited:.0f} limit_s={limit_s:.0f} {note}last: {last[:160]}"
            )
        time.sleep(0.2 if waited < 10 else 1.0)


def _start_failure(
    release: Release, guard: StartGuard | None, membership: Membership
) -> str | None:
    if guard and guard.starved:
        return "the engine was stopped"
    if problem := membership.problem():
        return problem
    if "SPARK_ENGINE_LOG" in os.environ:
        return None
    unit = systemd.state(release.serve_unit, "ActiveState", "MainPID", "Result")
    is_up = unit.get("ActiveState") in ("active", "activating", "reloading")
    if is_up and unit.get("MainPID", "0") not in ("0", ""):
        return None
    return f"the engine exited before it was ready ({release.serve_unit}: {unit.get('Result')})"


def read_log(release: Release, invocation_id: str) -> list[str]:
    """Return the log of this run of the engine, from the journal.

    ``SPARK_ENGINE_LOG`` names a file to read instead, for an engine that systemd does not run.
    """
    path = os.environ.get("SPARK_ENGINE_LOG")
    if path is not None:
        return Path(path).read_text(errors="replace").splitlines()
    return systemd.journal(invocation_id, release.serve_unit)
