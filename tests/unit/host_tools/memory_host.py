"""A simulated host with faults.

Each call of a port is a point at which a test can inject a fault. After each call and each event
the host checks the invariants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from memory_ports import (
    MemoryCheck,
    MemoryClock,
    MemoryDisk,
    MemoryEngines,
    MemoryGateway,
    MemoryTraffic,
    MemoryUnits,
)
from memory_systemd import A, B, Machine, release_of
from spark_contract.records import Rollout
from spark_contract.units import GATEWAY, SERVE, SWITCH
from spark_host.records import boot
from spark_host.rollout import record, rollout, steps
from spark_host.rollout.steps import FAILURES


class Killed(BaseException):
    """The process that made this call is gone."""


class PowerCut(BaseException):
    """All processes and everything in memory are gone."""


@dataclass
class Model(Machine):
    faults: dict[int, str] = field(default_factory=dict)
    troubles: dict[str, list[str]] = field(default_factory=dict)  # the same, by the call's name
    gateway_runs: bool = False
    full: bool = False
    stopping: bool = False
    known: set[str] = field(default_factory=set)  # releases that a deploy brought
    locks: set[Path] = field(default_factory=set)
    boots: int = 1
    gone: set[str] = field(default_factory=set)  # releases with a missing image or tree
    words: list[str] = field(default_factory=lambda: ["what its last run said"])  # in the journal
    calls: int = 0
    calls_of_first: int = 0
    proven: set[str] = field(default_factory=set)  # releases that passed a full check
    asked: list[str] = field(default_factory=list)  # changes that systemd shall start
    current: str | None = None  # the running rollout
    history: list[str] = field(default_factory=list)
    _seen: tuple[object, ...] = ()  # at the last check of the invariants

    # The host, as the tools get it.

    def host(self, run: str | None = None) -> steps.Host:
        return steps.Host(
            self.paths, MemoryDisk(self), MemoryUnits(self), MemoryClock(self),
            f"boot-{self.boots}", run, None, MemoryEngines(self), MemoryGateway(self),
            MemoryTraffic(self), MemoryCheck(self),
        )  # fmt: skip

    def call(
        self,
        name: str,
        effect: Callable[[], Any] = lambda: None,
        error: Exception | None = None,
    ) -> Any:
        if self.quiet:
            return effect()
        self.calls += 1
        assert self.calls < 5000, "it does not end"
        fault = self.faults.pop(self.calls, "")
        if self.troubles.get(name):
            fault = self.troubles[name].pop(0)
        self.history.append(f"{self.calls} {name}{' !' + fault if fault else ''}")
        if fault:
            self._strike(fault, error)
        found = effect()
        self.prove()
        if fault == "kill after":
            raise Killed
        if fault == "cut after":
            raise PowerCut
        if fault == "late" and error:
            raise error
        return found

    def _strike(self, fault: str, error: Exception | None) -> None:
        if fault == "kill before":
            raise Killed
        if fault == "cut before":
            raise PowerCut
        if fault == "reboot":
            self.stopping = True
            raise Killed
        if fault == "full":
            self.full = True
        elif fault == "hang":
            self.pass_time(60)
        elif fault == "dies":
            for unit in list(self.units):
                self._engine_ends(unit)
        elif fault in ("stop", "again", "other"):
            self._a_person(fault)
        if fault in ("fail", "hang") and error:
            raise error

    def _a_person(self, fault: str) -> None:
        self.quiet = True
        try:
            if fault == "stop":
                boot.stop_service("main", "ann", self.host())
            elif self.current:
                other = A if self.current == B else B
                name = self.current if fault == "again" else other
                if name in self.known:
                    joined = record.begin(name, self.host()).joined
                    assert joined or fault == "other"
                    self._run_changes()
        finally:
            self.quiet = False

    # Histories.

    def deploy(self, name: str) -> None:
        self.known.add(name)
        try:
            self._process(lambda: record.begin(name, self.host()))
            self._run_changes()
        except PowerCut:
            self.boot()
        if self.stopping:
            self.boot()

    def _run_changes(self) -> None:
        while self.asked:
            name, before = self.asked.pop(), self.current
            unit = self.unit(SWITCH.of(name))
            unit.state, unit.run, self.current = "activating", f"change-{next(self.ids)}", name
            host = self.host(unit.run)
            ended = self._process(partial(rollout.roll_out, name, host))
            self._process(partial(rollout.recover, name, replace(host, exit_status=str(ended))))
            unit.state, self.current = "inactive", before

    def _process(self, work: Callable[[], object]) -> object:
        try:
            return work()
        except Killed:
            self.history.append("killed")
        except FAILURES as error:
            self.history.append(f"error: {error}")
        return None

    def boot(self) -> None:
        self.history.append("boot")
        self.units, self.engines, self.open_to, self.asked = {}, {}, None, []
        self.locks, self.current, self.stopping, self.quiet = set(), None, False, False
        self.boots += 1
        self.gateway_runs = GATEWAY.of("main") in self.links
        for name in boot.enabled("main", self.host()):
            self.start(SERVE.of(name))
        self.settle()

    def settle(self) -> None:
        while (due_s := min((unit.due_s for unit in self.units.values()), default=1e9)) < 1e9:
            self._pass_until(due_s)

    def upgrade(self) -> None:
        self.driver += 1

    # Invariants.

    def serves(self) -> str | None:
        """Return the release that answers clients."""
        up = [name for name in self.engines if self.unit(SERVE.of(name)).state == "active"]
        return next((name for name in up if name == self.open_to and self.gateway_runs), None)

    def outcome(self, name: str) -> Rollout:
        found: Rollout = self.documents[self.paths.rollout(name)]
        return found

    def prove(self) -> None:
        host = self.host()
        good, stopped = boot.good("main", host), boot.is_stopped("main", host)
        seen = (self.open_to, *self.engines.items(), *self.links, good, stopped)
        if seen == self._seen:
            return
        self._seen = seen
        assert len(self.engines) <= 1, f"two engines: {self.engines}"
        if self.open_to is not None and self.engines:
            ((name, run),) = self.engines.items()
            assert run in self.proven_runs, f"the gateway is open to {name}, which is not proven"
            assert name in self.proven, f"the gateway is open to {name}, never fully proven"
        linked = boot.enabled("main", host)
        assert linked or good.release is None, "something is good and nothing boots"
        if stopped:
            return
        starts = [name for name in linked if not boot.obstacle(release_of(name), host)]
        assert len(starts) <= 1, f"two would boot: {starts}"
        assert starts or not linked, f"none of {linked} would boot"
        for name in starts:
            assert name in self.proven, f"{name} would boot and was never proven"
