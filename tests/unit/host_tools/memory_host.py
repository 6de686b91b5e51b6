"""A host in memory: its disk, systemd, engines, gateway, checks and clock.

Every call of a port is a point at which a test can let something go wrong, and after every call
and every event the host proves that nothing is wrong with itself. The tools' own rules decide what
starts and what opens; here is only what systemd, docker and nginx would do.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.records import Finding, Proof, Rollout
from spark_contract.release import Release
from spark_contract.units import GATEWAY, SERVE, SWITCH
from spark_host.check import runner
from spark_host.engine.client import SilentError
from spark_host.records import boot
from spark_host.rollout import ports, recover, request, rollout
from spark_host.rollout.steps import FAILURES
from stub_host import Host as FolderHost

A, B = (f"main-{digit * 12}" for digit in "ab")
LOAD_S, CHECK_S, REST_S, START_S, STARTS = 2.0, 3.0, 60.0, 100.0, 3


class Killed(BaseException):
    """The process that made this call is gone."""


class PowerCut(BaseException):
    """All processes and everything in memory are gone."""


@cache
def release_of(name: str) -> Release:
    """Return a release as the tools read it."""
    with tempfile.TemporaryDirectory() as folder:
        host = FolderHost(Paths(Path(folder)), Path())
        limits = {"start_s": START_S, "stop_s": 2, "drain_s": 1}
        return host.release(name, timeouts=limits)


class QuickPaths(Paths):
    """Paths that are put together once: histories ask for them a million times."""

    units = Path("/etc/systemd/system")
    run = Path("/run/spark")
    proof, rollout, request = (staticmethod(cache(partial(getattr(Paths, name), Paths(Path("/")))))
                              for name in ("proof", "rollout", "request"))  # fmt: skip
    good, stopped, rollback = (staticmethod(cache(partial(getattr(Paths, name), Paths(Path("/")))))
                               for name in ("good", "stopped", "rollback"))  # fmt: skip


@dataclass
class Unit:
    """What systemd knows of a unit."""

    state: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    run: str = ""
    due_s: float = float("inf")  # when its present state ends
    starts: int = 0


@dataclass
class Model:
    """The whole host, and what is going to happen to it: faults by the number of the call."""

    broken: dict[str, str] = field(default_factory=dict)  # release -> at which step it fails
    faults: dict[int, str] = field(default_factory=dict)
    troubles: dict[str, list[str]] = field(default_factory=dict)  # the same, by the call's name
    documents: dict[Path, Any] = field(default_factory=dict)
    links: set[str] = field(default_factory=set)  # units that start with the host
    units: dict[str, Unit] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)  # release -> run of its unit
    open_to: str | None = None
    gateway_runs: bool = False
    full: bool = False
    stopping: bool = False
    known: set[str] = field(default_factory=set)  # releases that a deploy brought
    locks: set[Path] = field(default_factory=set)
    driver: int = 1
    boots: int = 1
    at_s: float = 0.0
    gone: set[str] = field(default_factory=set)  # releases whose image or tree is
    words: list[str] = field(default_factory=lambda: ["what its last run said"])  # in the journal
    calls: int = 0
    calls_of_first: int = 0
    quiet: bool = False  # what a person does meanwhile succeeds
    proven_runs: set[str] = field(default_factory=set)  # whose quick check was passed
    proven: set[str] = field(default_factory=set)  # releases whose full check was passed
    asked: list[str] = field(default_factory=list)  # changes that systemd shall start
    current: str | None = None  # the change under way
    history: list[str] = field(default_factory=list)
    ids: Iterator[int] = field(default_factory=count)
    _seen: tuple[object, ...] = ()  # what was proven last

    paths = QuickPaths(Path("/"))

    # The host, as the tools get it.

    def host(self, run: str | None = None) -> ports.Host:
        return ports.Host(
            self.paths, MemoryDisk(self), MemoryUnits(self), MemoryClock(self), MemoryEngines(self),
            MemoryGateway(self), MemoryTraffic(self), MemoryCheck(self), f"boot-{self.boots}", run,
        )  # fmt: skip

    def call(
        self,
        name: str,
        effect: Callable[[], Any] = lambda: None,
        error: Exception | None = None,
    ) -> Any:
        """Do what a port is asked for, or what goes wrong instead."""
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
                    joined = request.begin(name, self.host()).joined
                    assert joined or fault == "other"
                    self._run_changes()
        finally:
            self.quiet = False

    # Histories.

    def deploy(self, name: str) -> None:
        """Ask for a release as a controller does, and let come what may."""
        self.known.add(name)
        try:
            self._process(lambda: request.begin(name, self.host()))
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
            self._process(partial(recover.recover, name, replace(host, exit_status=str(ended))))
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
        """Start again with nothing but what lies on the disk."""
        self.history.append("boot")
        self.units, self.engines, self.open_to, self.asked = {}, {}, None, []
        self.locks, self.current, self.stopping, self.quiet = set(), None, False, False
        self.boots += 1
        self.gateway_runs = GATEWAY.of("main") in self.links
        for name in boot.enabled("main", self.host()):
            self.start(SERVE.of(name))
        self.settle()

    def settle(self) -> None:
        """Let time pass until systemd has nothing more to do."""
        while (due_s := min((unit.due_s for unit in self.units.values()), default=1e9)) < 1e9:
            self._pass_until(due_s)

    def upgrade(self) -> None:
        """Put another driver on the host: what was proven has to be proven again."""
        self.driver += 1

    # What is true.

    def serves(self) -> str | None:
        """Return the release that answers clients."""
        up = [name for name in self.engines if self.unit(SERVE.of(name)).state == "active"]
        return next((name for name in up if name == self.open_to and self.gateway_runs), None)

    def outcome(self, name: str) -> Rollout:
        found: Rollout = self.documents[self.paths.rollout(name)]
        return found

    def prove(self) -> None:
        """Nothing of this may ever be so, whatever happened."""
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

    # systemd.

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
        if self.engines:  # the lock of the engine is held
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
        """Write what a check found, by the tools' own rules."""
        run = self.unit(release.serve_unit).run
        finding = Finding("answers", ok, "it answers" if ok else "it is wrong", 1.0)
        result = Proof(
            release.name, release.digest, run, level, ok, host.clock.now(), (finding,),
            self.versions(), {"version": "1"}, False, (),
        )  # fmt: skip
        quiet, self.quiet = self.quiet, self.quiet or level == "quick"  # in another process
        try:
            runner.keep(result, host, str)
        finally:
            self.quiet = quiet
        return result


def refused(where: str) -> HostToolError:
    return HostToolError(where, "did not answer", "run again")


@dataclass
class MemoryPort:
    """A port of the host."""

    model: Model


class MemoryUnits(MemoryPort):
    """systemd."""

    def show(self, units: Iterable[str], properties: Iterable[str]) -> dict[str, dict[str, str]]:
        return self.model.call(
            "show", lambda: {one: self._state(one) for one in units}, refused("systemctl show")
        )

    def _state(self, name: str) -> dict[str, str]:
        unit = self.model.unit(name)
        job = "1" if unit.sub == "start" else "0"
        return {"Id": name, "ActiveState": unit.state, "SubState": unit.sub, "Job": job,
                "Result": unit.result, "InvocationID": unit.run}  # fmt: skip

    def state(self, unit: str, *properties: str) -> dict[str, str]:
        return self.show([unit], properties)[unit]

    def is_active(self, unit: str) -> bool:
        return self.state(unit)["ActiveState"] == "active"

    def invocation(self, unit: str) -> str | None:
        return self.state(unit)["InvocationID"] or None

    def listed(self, pattern: str) -> list[str]:
        prefix = pattern.partition("*")[0]
        return self.model.call(
            "listed",
            lambda: [name for name, unit in self.model.units.items()
                     if name.startswith(prefix) and unit.state != "inactive"],
            refused("systemctl list-units"),
        )  # fmt: skip

    def journal(self, invocation_id: str, unit: str, lines: int | None = None) -> list[str]:
        return self.model.call("journal", lambda: self.model.words)

    def is_stopping(self) -> bool:
        return self.model.call("is stopping", lambda: self.model.stopping)

    def reload(self) -> None:
        self.model.call("reload")

    def reset(self, unit: str) -> None:
        self.model.call("reset", lambda: self.model.reset(unit))

    def begin(self, unit: str) -> None:
        self._start("begin", unit)

    def start(self, unit: str, limit_s: float) -> None:
        self._start("start", unit)
        self.model.settle()

    def _start(self, name: str, unit: str) -> None:
        self.reset(unit)
        release = SWITCH.instance(unit)

        def effect() -> None:
            if unit == SWITCH.of(release):
                self.model.asked.append(release)
            else:
                self.model.start(unit)

        self.model.call(name, effect, refused(f"systemctl start {unit}"))

    def stop(self, unit: str, limit_s: float) -> None:
        self.model.call("stop", lambda: self.model.stop(unit), refused(f"systemctl stop {unit}"))

    def enable(self, unit: str) -> None:
        links = self.model.links
        self.model.call("enable", lambda: links.add(unit), refused(f"systemctl enable {unit}"))

    def disable(self, unit: str) -> None:
        links = self.model.links
        self.model.call(
            "disable", lambda: links.discard(unit), refused(f"systemctl disable {unit}")
        )


class MemoryDisk(MemoryPort):
    """Documents that are whole or absent; reading them never fails."""

    def read(self, kind: type[Any], path: Path) -> Any:
        found = self.model.documents.get(path)
        assert found is None or isinstance(found, kind)
        return found

    def write(self, path: Path, document: Any) -> None:
        error = OSError(errno.ENOSPC, "No space left on device", str(path))

        def effect() -> None:
            if self.model.full:
                raise error
            self.model.documents[path] = document

        self.model.call(f"write {path.parent.name}", effect, error)

    def remove(self, path: Path) -> bool:
        gone = lambda: self.model.documents.pop(path, None) is not None  # noqa: E731
        return self.model.call(f"remove {path.parent.name}", gone)

    def exists(self, path: Path) -> bool:
        return path in self.model.documents

    def listed(self, directory: Path) -> list[str]:
        assert directory.name == "multi-user.target.wants"
        return sorted(self.model.links)

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        if path in self.model.locks:
            raise BlockingIOError
        self.model.locks.add(path)
        try:
            yield
        finally:
            self.model.locks.discard(path)

    def load(self, name: str, paths: Paths) -> Release:
        if name not in self.model.known:
            raise HostToolError(name, "no such release", "run the deploy", 2)
        return release_of(name)

    def names(self, paths: Paths) -> list[str]:
        return sorted(self.model.known)


class MemoryClock(MemoryPort):
    """Time that passes when someone waits."""

    def monotonic(self) -> float:
        return self.model.at_s

    def sleep(self, seconds: float, /) -> None:
        # Nobody waits for nothing: the next event comes at once.
        due_s = min((unit.due_s for unit in self.model.units.values()), default=0.0)
        wait_s = due_s - self.model.at_s if due_s < float("inf") else 0.0
        self.model.call("sleep", lambda: self.model.pass_time(max(seconds, wait_s, 0.5)))

    def now(self) -> str:
        return f"{int(self.model.at_s):09d}"


class MemoryEngines(MemoryPort):
    """docker and the memory."""

    def part_problem(self, release: Release) -> HostToolError | None:
        if release.name in self.model.gone:
            return HostToolError(f"tree of {release.name}", "has no receipt", "deploy again")
        return self._told("parts")

    def problem(self, release: Release, paths: Paths) -> HostToolError | None:
        return self._told("parts, GPU and memory")

    def _told(self, name: str) -> HostToolError | None:
        try:
            self.model.call(name, error=refused("docker"))
        except HostToolError as error:
            return error
        return None

    def make_room(self, release: Release, report: Callable[[str], None]) -> None:
        def effect() -> None:
            for name in list(self.model.engines):
                self.model._engine_ends(SERVE.of(name))

        self.model.call("make room", effect, refused("memory"))

    def unfinished(self, release: Release, paths: Paths) -> float:
        return self.model.call("unfinished", lambda: 0.0, SilentError("no answer in time"))


class MemoryGateway(MemoryPort):
    """nginx and its unit."""

    def problem(self, release: Release, paths: Paths) -> HostToolError | None:
        return MemoryEngines(self.model)._told("gateway")

    def bring_up(self, release: Release, paths: Paths) -> None:
        def effect() -> None:
            self.model.links.add(GATEWAY.of(release.service))
            self.model.gateway_runs = True

        self.model.call("bring up", effect, refused("gateway"))

    def wait_until_listening(self, service: str, paths: Paths) -> None:
        self.model.call("listening", error=refused("gateway"))


class MemoryTraffic(MemoryPort):
    """Whether requests pass."""

    def close(self, service: str, paths: Paths) -> None:
        self.model.call("close", self._close, OSError(errno.EIO, "I/O error"))

    def _close(self) -> None:
        self.model.open_to = None

    def open_for(self, release: Release, paths: Paths) -> None:
        def effect() -> None:
            if release.name not in self.model.engines:
                raise FileNotFoundError(errno.ENOENT, "No such file", "engine.sock")
            self.model.open_to = release.name

        self.model.call("open", effect, OSError(errno.EIO, "I/O error"))


class MemoryCheck(MemoryPort):
    """The full check, which sees what is wrong with a release."""

    def full(self, release: Release, host: ports.Host, report: Callable[[str], None]) -> Proof:
        def effect() -> Proof:
            run = self.model.engines.get(release.name)
            self.model.pass_time(CHECK_S)
            same = run is not None and self.model.engines.get(release.name) == run
            ok = same and release.name not in self.model.broken
            if ok:
                self.model.proven.add(release.name)
            return self.model.proof(release, "full", ok, host)

        found: Proof = self.model.call("full check", effect, refused("systemctl show"))
        return found

    def versions(self) -> dict[str, str]:
        return self.model.call("versions", self.model.versions)

    def speed(self, release: Release, paths: Paths, report: Callable[[str], None]) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", "x.json")
