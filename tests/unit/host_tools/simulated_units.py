"""Simulated units and engines: they start, run, fail and restart as time passes.

The tools' own rules decide which release may start and when the gateway opens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from spark_contract.paths import Paths
from spark_contract.records import Finding, Proof
from spark_contract.release import Release
from spark_contract.units import SERVE
from spark_host.check import runner
from spark_host.records import boot
from spark_host.rollout import steps
from stub_host import Host as FolderHost

A, B = (f"main-{digit * 12}" for digit in "ab")
LOAD_S, RESTART_S, START_LIMIT_S, MAX_STARTS = 2.0, 60.0, 100.0, 3
NEVER_S = float("inf")


@cache
def release_of(name: str) -> Release:
    with tempfile.TemporaryDirectory() as folder:
        host = FolderHost(Paths(Path(folder)), Path())
        return host.release(name, timeouts={"start_s": START_LIMIT_S, "stop_s": 2, "drain_s": 1})


def _cached(name: str) -> Any:
    return staticmethod(cache(partial(getattr(Paths, name), Paths(Path("/")))))


class CachedPaths(Paths):
    units = Path("/etc/systemd/system")
    run = Path("/run/spark")
    proof, rollout, request = map(_cached, ("proof", "rollout", "request"))
    good, stopped, rollback = map(_cached, ("good", "stopped", "rollback"))


@dataclass
class Unit:
    state: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    run: str = ""
    due_s: float = NEVER_S  # time of the next state
    starts: int = 0

    def set(self, state: str, sub: str, due_s: float = NEVER_S) -> None:
        self.state, self.sub, self.due_s = state, sub, due_s


@dataclass
class SimulatedUnits:
    broken: dict[str, str] = field(default_factory=dict)  # release -> the step at which it fails
    warning: str = ""  # of the full check
    documents: dict[Path, Any] = field(default_factory=dict)
    links: set[str] = field(default_factory=set)  # units that start at boot
    units: dict[str, Unit] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)  # release -> run of the unit
    open_to: str | None = None
    driver: int = 1
    now_s: float = 0.0
    proven_runs: set[str] = field(default_factory=set)  # runs that passed the quick check
    ids: Iterator[int] = field(default_factory=count)
    ignores_faults: bool = False

    paths = CachedPaths(Path("/"))

    def host(self) -> steps.Host:
        raise NotImplementedError

    def check_invariants(self) -> None:
        raise NotImplementedError

    def unit(self, name: str) -> Unit:
        return self.units.setdefault(name, Unit())

    def next_due_s(self) -> float:
        return min((unit.due_s for unit in self.units.values()), default=NEVER_S)

    def pass_time(self, seconds: float) -> None:
        self._pass_until(self.now_s + seconds)

    def settle(self) -> None:
        """Pass time until no unit changes."""
        while (due_s := self.next_due_s()) < NEVER_S:
            self._pass_until(due_s)

    def _pass_until(self, end_s: float) -> None:
        while (due_s := self.next_due_s()) <= end_s and due_s < NEVER_S:
            self.now_s = max(self.now_s, due_s)
            self._advance(next(name for name, unit in self.units.items() if unit.due_s == due_s))
            self.check_invariants()
        self.now_s = end_s

    def start(self, name: str) -> None:
        unit, release = self.unit(name), release_of(SERVE.instance(name))
        if unit.state == "active" or (unit.state, unit.sub) == ("activating", "start"):
            return
        unit.run = f"run-{next(self.ids)}"
        if boot.obstacle(release, self.host()):  # ExecCondition
            unit.set("inactive", "dead")
            unit.result = "exec-condition"
            return
        unit.set("activating", "start")
        unit.starts += 1
        if self.engines:  # another process has the engine lock
            self._fail(unit)
            return
        self.open_to = None
        self.engines[release.name] = unit.run
        hangs = self.broken.get(release.name) == "hangs"
        unit.due_s = self.now_s + (START_LIMIT_S if hangs else LOAD_S)

    def _advance(self, name: str) -> None:
        unit, release = self.units[name], release_of(SERVE.instance(name))
        unit.due_s = NEVER_S
        if unit.sub == "auto-restart":
            self.start(name)
            return
        ok = self.broken.get(release.name) not in ("dies", "quick", "hangs")
        self.write_proof(release, "quick", ok, self.host())
        if not ok:
            self.end_engine(name)
            return
        self.proven_runs.add(unit.run)
        if boot.opens_at_start(release, self.host()):
            self.open_to = release.name
        unit.set("active", "running")

    def end_engine(self, name: str) -> None:
        if self.engines.pop(SERVE.instance(name), None) is not None:
            self.open_to = None
            self._fail(self.units[name])

    def _fail(self, unit: Unit) -> None:
        unit.result = "exit-code"
        if unit.starts < MAX_STARTS:
            unit.set("activating", "auto-restart", self.now_s + RESTART_S)
        else:
            unit.set("failed", "failed")

    def stop(self, name: str) -> None:
        unit = self.unit(name)
        if self.engines.pop(SERVE.instance(name), None) is not None:
            self.open_to = None
        unit.due_s = NEVER_S
        if unit.state != "failed":
            unit.set("inactive", "dead")

    def reset(self, name: str) -> None:
        unit = self.unit(name)
        unit.starts = 0
        if unit.state == "failed":
            unit.set("inactive", "dead")

    def versions(self) -> dict[str, str]:
        return {"driver": str(self.driver)}

    def write_proof(self, release: Release, level: str, ok: bool, host: Any) -> Proof:
        run = self.unit(release.serve_unit).run
        findings = [Finding("answers", ok, "it answers" if ok else "it is wrong", 1.0)]
        if self.warning and level == "full":
            findings.append(Finding("repeat", False, self.warning, 1.0, "warn"))
        result = Proof(
            release.name, release.digest, run, level, ok, host.clock.now(), tuple(findings),
            self.versions(), {"version": "1"}, False, (),
        )  # fmt: skip
        # The quick check runs in another process, so it has no faults.
        ignored, self.ignores_faults = self.ignores_faults, self.ignores_faults or level == "quick"
        try:
            runner.write_proof(result, host, str)
        finally:
            self.ignores_faults = ignored
        return result
