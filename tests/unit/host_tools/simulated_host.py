"""A simulated host with faults.

A test can inject a fault at each call of a port. After each call and each event the host checks
its invariants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import simulated_ports as ports
from simulated_units import A, B, SimulatedUnits, release_of
from spark_contract.records import Rollout
from spark_contract.units import GATEWAY, SERVE, SWITCH
from spark_host.records import boot
from spark_host.rollout import record, rollout, steps
from spark_host.rollout.steps import FAILURES


class Killed(BaseException):
    """The process that made this call is killed."""


class PowerCut(BaseException):
    """All processes and everything in memory are lost."""


@dataclass
class SimulatedHost(SimulatedUnits):
    faults: dict[int, str] = field(default_factory=dict)  # by number of the call
    faults_at: dict[str, list[str]] = field(default_factory=dict)  # by name of the call
    gateway_runs: bool = False
    disk_full: bool = False
    stopping: bool = False
    releases: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)  # releases without image or checkpoint
    locks: set[Path] = field(default_factory=set)
    boots: int = 1
    journal: list[str] = field(default_factory=lambda: ["a line of the last run"])
    calls: int = 0
    calls_of_first: int = 0
    proven: set[str] = field(default_factory=set)  # releases that passed a full check
    queued: list[str] = field(default_factory=list)  # rollouts that systemd will start
    current: str | None = None  # the running rollout
    history: list[str] = field(default_factory=list)
    _checked: tuple[object, ...] = ()  # the state of the last invariant check

    def host(self, run: str | None = None) -> steps.Host:
        """Return this host as the tools see it."""
        return steps.Host(
            self.paths, ports.Disk(self), ports.Systemd(self), ports.Clock(self),
            f"boot-{self.boots}", run, None, ports.Engines(self), ports.Gateway(self),
            ports.Traffic(self), ports.Check(self),
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
        """Stop the service, or request the running or another rollout."""
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
            unit = self.unit(SWITCH.of(name))
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
        self.gateway_runs = GATEWAY.of("main") in self.links
        for name in boot.enabled("main", self.host()):
            self.start(SERVE.of(name))
        self.settle()

    def upgrade(self) -> None:
        self.driver += 1

    def serving(self) -> str | None:
        """Return the release that answers clients."""
        name = self.open_to
        is_up = name in self.engines and self.unit(SERVE.of(str(name))).state == "active"
        return name if is_up and self.gateway_runs else None

    def good(self) -> str | None:
        return boot.good("main", self.host()).release

    def enabled(self) -> list[str]:
        return boot.enabled("main", self.host())

    def outcome(self, name: str) -> Rollout:
        rollout: Rollout = self.documents[self.paths.rollout(name)]
        return rollout

    def check_invariants(self) -> None:
        host = self.host()
        good, stopped = boot.good("main", host), boot.is_stopped("main", host)
        state = (self.open_to, *self.engines.items(), *self.links, good, stopped)
        if state == self._checked:
            return
        self._checked = state
        assert len(self.engines) <= 1, f"two engines: {self.engines}"
        if self.open_to is not None and self.engines:
            ((name, run),) = self.engines.items()
            assert run in self.proven_runs, f"the gateway is open to {name}, which is not proven"
            assert name in self.proven, f"the gateway is open to {name}, never fully proven"
        linked = boot.enabled("main", host)
        assert linked or good.release is None, "a release is good, but none boots"
        if stopped:
            return
        starts = [name for name in linked if not boot.obstacle(release_of(name), host)]
        assert len(starts) <= 1, f"two would boot: {starts}"
        assert starts or not linked, f"none of {linked} would boot"
        for name in starts:
            assert name in self.proven, f"{name} would boot and was never proven"
