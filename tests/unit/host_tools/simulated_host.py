"""A simulated host with faults.

A test can inject a fault at each call of a port. After each call and each event the host checks
its invariants. The tools' own rules decide which release may start and when the gateway opens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import simulated_ports as ports
from simulated_ports import NEVER_S, START_LIMIT_S, release_of
from spark_contract.paths import Paths
from spark_contract.records import Finding, Proof, Rollout
from spark_contract.release import Release
from spark_contract.units import GATEWAY, SERVE, SWITCH
from spark_host.check import runner
from spark_host.records import boot
from spark_host.rollout import record, rollout, steps
from spark_host.rollout.steps import FAILURES

A, B = (f"main-{digit * 12}" for digit in "ab")
LOAD_S, RESTART_S, MAX_STARTS = 2.0, 60.0, 3


class Killed(BaseException):
    """The process that made this call is killed."""


class PowerCut(BaseException):
    """All processes and everything in memory are lost."""


def _cached(name: str) -> Any:
    return staticmethod(cache(partial(getattr(Paths, name), Paths(Path("/")))))


class CachedPaths(Paths):
    units = Path("/etc/systemd/system")
    run = Path("/run/spark")
    proof, rollout, request = map(_cached, ("proof", "rollout", "request"))
    known_good, stopped, rollback = map(_cached, ("known_good", "stopped", "rollback"))


@dataclass
class Unit:
    state: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    run: str = ""
    due_s: float = NEVER_S
    starts: int = 0

    def set(self, state: str, sub: str, due_s: float = NEVER_S) -> None:
        self.state, self.sub, self.due_s = state, sub, due_s


@dataclass
class SimulatedHost:
    broken: dict[str, str] = field(default_factory=dict)
    warning: str = ""
    documents: dict[Path, Any] = field(default_factory=dict)
    links: set[str] = field(default_factory=set)
    units: dict[str, Unit] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    open_to: str | None = None
    driver: int = 1
    now_s: float = 0.0
    proven_runs: set[str] = field(default_factory=set)
    ids: Iterator[int] = field(default_factory=count)
    ignores_faults: bool = False

    faults: dict[int, str] = field(default_factory=dict)
    faults_at: dict[str, list[str]] = field(default_factory=dict)
    gateway_runs: bool = False
    disk_full: bool = False
    stopping: bool = False
    releases: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)
    locks: set[Path] = field(default_factory=set)
    boots: int = 1
    journal: list[str] = field(default_factory=lambda: ["a line of the last run"])
    calls: int = 0
    calls_of_first: int = 0
    proven: set[str] = field(default_factory=set)
    queued: list[str] = field(default_factory=list)
    current: str | None = None
    history: list[str] = field(default_factory=list)
    _checked: tuple[object, ...] = ()

    paths = CachedPaths(Path("/"))

    def host(self, run: str | None = None) -> steps.Host:
        return steps.Host(
            self.paths, ports.Disk(self), ports.Systemd(self), ports.Clock(self),
            f"boot-{self.boots}", run, None, ports.Engines(self), ports.Gateway(self),
            ports.Check(self),
        )  # fmt: skip

    def call(
        self, name: str, effect: Callable[[], Any] = lambda: None, error: Exception | None = None
    ) -> Any:
        if self.ignores_faults:
            return effect()
        self.calls += 1
        assert self.calls < 5000, "endless loop"
        fault = self.faults.pop(self.calls, "")
        if self.faults_at.get(name):
            fault = self.faults_at[name].pop(0)
        self.history.append(f"{self.calls} {name}{' !' + fault if fault else ''}")
        if fault:
            self._inject(fault, error)
        result = effect()
        self.check_invariants()
        if fault == "kill after":
            raise Killed
        if fault == "cut after":
            raise PowerCut
        if fault == "late" and error:
            raise error
        return result

    def _inject(self, fault: str, error: Exception | None) -> None:
        if fault == "kill before":
            raise Killed
        if fault == "cut before":
            raise PowerCut
        if fault == "reboot":
            self.stopping = True
            raise Killed
        if fault == "full":
            self.disk_full = True
        elif fault == "hang":
            self.pass_time(60)
        elif fault == "dies":
            for unit in list(self.units):
                self.end_engine(unit)
        elif fault in ("stop", "again", "other"):
            self._act_as_user(fault)
        if fault in ("fail", "hang") and error:
            raise error

    def _act_as_user(self, action: str) -> None:
        self.ignores_faults = True
        try:
            if action == "stop":
                boot.stop_service("main", "ann", self.host())
            elif self.current:
                other = A if self.current == B else B
                name = self.current if action == "again" else other
                if name in self.releases:
                    joined = record.begin(name, self.host()).joined
                    assert joined or action == "other"
                    self._run_rollouts()
        finally:
            self.ignores_faults = False

    def deploy(self, name: str) -> None:
        self.releases.add(name)
        try:
            self._run_process(lambda: record.begin(name, self.host()))
            self._run_rollouts()
        except PowerCut:
            self.boot()
        if self.stopping:
            self.boot()

    def _run_rollouts(self) -> None:
        while self.queued:
            name, before = self.queued.pop(), self.current
            unit = self.unit(SWITCH.unit(name))
            unit.state, unit.run, self.current = "activating", f"rollout-{next(self.ids)}", name
            host = self.host(unit.run)
            status = self._run_process(partial(rollout.roll_out, name, host))
            host = replace(host, exit_status=str(status))
            self._run_process(partial(rollout.recover, name, host))
            unit.state, self.current = "inactive", before

    def _run_process(self, work: Callable[[], object]) -> object:
        try:
            return work()
        except Killed:
            self.history.append("killed")
        except FAILURES as error:
            self.history.append(f"error: {error}")
        return None

    def boot(self) -> None:
        self.history.append("boot")
        self.units, self.engines, self.open_to, self.queued = {}, {}, None, []
        self.locks, self.current, self.stopping, self.ignores_faults = set(), None, False, False
        self.boots += 1
        self.gateway_runs = GATEWAY.unit("main") in self.links
        for name in boot.enabled_releases("main", self.host()):
            self.start(SERVE.unit(name))
        self.settle()

    def upgrade(self) -> None:
        self.driver += 1

    def serving(self) -> str | None:
        name = self.open_to
        is_up = name in self.engines and self.unit(SERVE.unit(str(name))).state == "active"
        return name if is_up and self.gateway_runs else None

    def known_good(self) -> str | None:
        return boot.read_known_good("main", self.host()).release

    def enabled(self) -> list[str]:
        return boot.enabled_releases("main", self.host())

    def outcome(self, name: str) -> Rollout:
        rollout: Rollout = self.documents[self.paths.rollout(name)]
        return rollout

    def check_invariants(self) -> None:
        host = self.host()
        good, stopped = boot.read_known_good("main", host), boot.is_stopped("main", host)
        state = (self.open_to, *self.engines.items(), *self.links, good, stopped)
        if state == self._checked:
            return
        self._checked = state
        assert len(self.engines) <= 1, f"two engines: {self.engines}"
        if self.open_to is not None and self.engines:
            ((name, run),) = self.engines.items()
            assert run in self.proven_runs, f"the gateway is open to {name}, which is not proven"
            assert name in self.proven, f"the gateway is open to {name}, never fully proven"
        linked = boot.enabled_releases("main", host)
        assert linked or good.release is None, "a release is known-good, but none boots"
        if stopped:
            return
        starts = [name for name in linked if not boot.reason_not_to_start(release_of(name), host)]
        assert len(starts) <= 1, f"two would boot: {starts}"
        assert starts or not linked, f"none of {linked} would boot"
        for name in starts:
            assert name in self.proven, f"{name} would boot and was never proven"

    # Units and engines start, run, fail and restart as time passes.

    def unit(self, name: str) -> Unit:
        return self.units.setdefault(name, Unit())

    def next_due_s(self) -> float:
        return min((unit.due_s for unit in self.units.values()), default=NEVER_S)

    def pass_time(self, seconds: float) -> None:
        self._pass_until(self.now_s + seconds)

    def settle(self) -> None:
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
        if boot.reason_not_to_start(release, self.host()):
            unit.set("inactive", "dead")
            unit.result = "exec-condition"
            return
        unit.set("activating", "start")
        unit.starts += 1
        if self.engines:
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
