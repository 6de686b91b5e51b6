"""Units and engines of a host in memory: they start, run, fail and rest as time passes.

The tools' own rules decide what may start and what opens.
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
LOAD_S, REST_S, START_S, STARTS = 2.0, 60.0, 100.0, 3


@cache
def release_of(name: str) -> Release:
    """Return a release as the tools read it."""
    with tempfile.TemporaryDirectory() as folder:
        host = FolderHost(Paths(Path(folder)), Path())
        limits = {"start_s": START_S, "stop_s": 2, "drain_s": 1}
        return host.release(name, timeouts=limits)


class QuickPaths(Paths):
    units = Path("/etc/systemd/system")
    run = Path("/run/spark")
    proof, rollout, request = (staticmethod(cache(partial(getattr(Paths, name), Paths(Path("/")))))
                              for name in ("proof", "rollout", "request"))  # fmt: skip
    good, stopped, rollback = (staticmethod(cache(partial(getattr(Paths, name), Paths(Path("/")))))
                               for name in ("good", "stopped", "rollback"))  # fmt: skip


@dataclass
class Unit:
    state: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    run: str = ""
    due_s: float = float("inf")  # of the next state
    starts: int = 0


@dataclass
class Machine:
    broken: dict[str, str] = field(default_factory=dict)  # release -> at which step it fails
    doubts: str = ""  # warnings of the full check
    documents: dict[Path, Any] = field(default_factory=dict)
    links: set[str] = field(default_factory=set)  # units that start with the host
    units: dict[str, Unit] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)  # run of the unit by release
    open_to: str | None = None
    driver: int = 1
    at_s: float = 0.0
    proven_runs: set[str] = field(default_factory=set)  # runs that passed the quick check
    ids: Iterator[int] = field(default_factory=count)
    quiet: bool = False  # calls of ports succeed

    paths = QuickPaths(Path("/"))

    def host(self) -> steps.Host:
        """Return this host as the tools get it."""
        raise NotImplementedError

    def prove(self) -> None:
        raise NotImplementedError

    def unit(self, name: str) -> Unit:
        return self.units.setdefault(name, Unit())

    def pass_time(self, seconds: float) -> None:
        self._pass_until(self.at_s + seconds)

    def _pass_until(self, end_s: float) -> None:
        while True:
            due = min(self.units, key=lambda name: self.units[name].due_s, default=None)
            if due is None or self.units[due].due_s > end_s:
                break
            self.at_s = max(self.at_s, self.units[due].due_s)
            self._due(due)
            self.prove()
        self.at_s = end_s

    def start(self, name: str) -> None:
        unit, release = self.unit(name), release_of(SERVE.instance(name))
        if unit.state == "active" or (unit.state, unit.sub) == ("activating", "start"):
            return
        unit.run, unit.due_s = f"run-{next(self.ids)}", float("inf")
        if boot.obstacle(release, self.host()):  # ExecCondition
            unit.state, unit.sub, unit.result = "inactive", "dead", "exec-condition"
            return
        unit.state, unit.sub, unit.starts = "activating", "start", unit.starts + 1
        if self.engines:  # another process has the engine lock
            self._fails(unit)
            return
        self.open_to = None
        self.engines[release.name] = unit.run
        slow = self.broken.get(release.name) == "hangs"
        unit.due_s = self.at_s + (START_S if slow else LOAD_S)

    def _due(self, name: str) -> None:
        unit, release = self.units[name], release_of(SERVE.instance(name))
        unit.due_s = float("inf")
        if unit.sub == "auto-restart":
            self.start(name)
            return
        wrong = self.broken.get(release.name) in ("dies", "quick", "hangs")
        self.proof(release, "quick", not wrong, self.host())
        if wrong:
            self._engine_ends(name)
            return
        self.proven_runs.add(unit.run)
        if boot.opens_at_start(release, self.host()):
            self.open_to = release.name
        unit.state, unit.sub = "active", "running"

    def _engine_ends(self, name: str) -> None:
        if self.engines.pop(SERVE.instance(name), None) is not None:
            self.open_to = None
            self._fails(self.units[name])

    def _fails(self, unit: Unit) -> None:
        unit.result = "exit-code"
        if unit.starts < STARTS:
            unit.state, unit.sub, unit.due_s = "activating", "auto-restart", self.at_s + REST_S
        else:
            unit.state, unit.sub, unit.due_s = "failed", "failed", float("inf")

    def stop(self, name: str) -> None:
        unit = self.unit(name)
        if self.engines.pop(SERVE.instance(name), None) is not None:
            self.open_to = None
        unit.due_s = float("inf")
        if unit.state != "failed":
            unit.state, unit.sub = "inactive", "dead"

    def reset(self, name: str) -> None:
        unit = self.unit(name)
        unit.starts = 0
        if unit.state == "failed":
            unit.state, unit.sub = "inactive", "dead"

    def versions(self) -> dict[str, str]:
        return {"driver": str(self.driver)}

    def proof(self, release: Release, level: str, ok: bool, host: Any) -> Proof:
        run = self.unit(release.serve_unit).run
        findings = [Finding("answers", ok, "it answers" if ok else "it is wrong", 1.0)]
        if self.doubts and level == "full":
            findings.append(Finding("repeat", False, self.doubts, 1.0, "warn"))
        result = Proof(
            release.name, release.digest, run, level, ok, host.clock.now(), tuple(findings),
            self.versions(), {"version": "1"}, False, (),
        )  # fmt: skip
        quiet, self.quiet = self.quiet, self.quiet or level == "quick"  # in another process
        try:
            runner.write_proof(result, host, str)
        finally:
            self.quiet = quiet
        return result
