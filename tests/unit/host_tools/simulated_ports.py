"""Simulated parts of a host; each call passes :meth:`simulated_host.SimulatedHost.call`."""

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spark_contract.paths import Paths
from spark_contract.records import Proof
from spark_contract.release import Release
from spark_contract.tool import HostToolError
from spark_contract.units import GATEWAY, SERVE, SWITCH
from spark_host.engine.client import EngineTimeoutError
from spark_host.rollout import steps
from stub_host import Host as FolderHost

CHECK_S, START_LIMIT_S, NEVER_S = 3.0, 100.0, float("inf")


@cache
def release_of(name: str) -> Release:
    with TemporaryDirectory() as folder:
        host = FolderHost(Paths(Path(folder)), Path())
        return host.release(name, timeouts={"start_s": START_LIMIT_S, "stop_s": 2, "drain_s": 1})


def no_answer(where: str) -> HostToolError:
    return HostToolError(where, "did not answer", "run again")


@dataclass
class Port:
    sim: Any

    def problem_at(self, call: str) -> HostToolError | None:
        try:
            self.sim.call(call, error=no_answer(call))
        except HostToolError as error:
            return error
        return None


class Systemd(Port):
    def show(self, units: Iterable[str], properties: Iterable[str]) -> dict[str, dict[str, str]]:
        error = no_answer("systemctl show")
        return self.sim.call("show", lambda: {unit: self._state(unit) for unit in units}, error)

    def _state(self, name: str) -> dict[str, str]:
        unit = self.sim.unit(name)
        job = "1" if unit.sub == "start" else "0"
        return {"Id": name, "ActiveState": unit.state, "SubState": unit.sub, "Job": job,
                "Result": unit.result, "InvocationID": unit.run}  # fmt: skip

    def state(self, unit: str, *properties: str) -> dict[str, str]:
        return self.show([unit], properties)[unit]

    def is_active(self, unit: str) -> bool:
        return self.state(unit)["ActiveState"] == "active"

    def read_invocation_id(self, unit: str) -> str | None:
        return self.state(unit)["InvocationID"] or None

    def list_units(self, pattern: str) -> list[str]:
        prefix = pattern.partition("*")[0]

        def names() -> list[str]:
            units = self.sim.units.items()
            return [n for n, u in units if n.startswith(prefix) and u.state != "inactive"]

        return self.sim.call("listed", names, no_answer("systemctl list-units"))

    def journal(self, invocation_id: str, unit: str, lines: int | None = None) -> list[str]:
        return self.sim.call("journal", lambda: self.sim.journal)

    def is_stopping(self) -> bool:
        return self.sim.call("is stopping", lambda: self.sim.stopping)

    def reload(self) -> None:
        self.sim.call("reload")

    def reset_failed(self, unit: str) -> None:
        self.sim.call("reset", lambda: self.sim.reset(unit))

    def start_in_background(self, unit: str, call: str = "begin") -> None:
        self.reset_failed(unit)
        release = SWITCH.instance(unit)

        def effect() -> None:
            if unit == SWITCH.unit(release):
                self.sim.queued.append(release)
            elif not unit.endswith(".timer"):
                self.sim.start(unit)

        self.sim.call(call, effect, no_answer(f"systemctl start {unit}"))

    def start(self, unit: str, limit_s: float) -> None:
        self.start_in_background(unit, "start")
        self.sim.settle()

    def stop(self, unit: str, limit_s: float) -> None:
        self.sim.call("stop", lambda: self.sim.stop(unit), no_answer(f"systemctl stop {unit}"))

    def enable(self, unit: str) -> None:
        error = no_answer(f"systemctl enable {unit}")
        self.sim.call("enable", lambda: self.sim.links.add(unit), error)

    def disable(self, unit: str) -> None:
        error = no_answer(f"systemctl disable {unit}")
        self.sim.call("disable", lambda: self.sim.links.discard(unit), error)


class Disk(Port):
    """Documents that are whole or absent; reading them never fails."""

    def read(self, kind: type[Any], path: Path) -> Any:
        document = self.sim.documents.get(path)
        assert document is None or isinstance(document, kind)
        return document

    def write(self, path: Path, document: Any) -> None:
        error = OSError(errno.ENOSPC, "No space left on device", str(path))

        def effect() -> None:
            if self.sim.disk_full:
                raise error
            self.sim.documents[path] = document

        self.sim.call(f"write {path.parent.name}", effect, error)

    def remove(self, path: Path) -> bool:
        documents = self.sim.documents
        return self.sim.call(
            f"remove {path.parent.name}", lambda: documents.pop(path, None) is not None
        )

    def exists(self, path: Path) -> bool:
        return path in self.sim.documents

    def list_folder(self, directory: Path) -> list[str]:
        assert directory.name == "multi-user.target.wants"
        return sorted(self.sim.links)

    @contextmanager
    def locked(self, path: Path, *, wait: bool = False) -> Iterator[None]:
        if path in self.sim.locks:
            raise BlockingIOError
        self.sim.locks.add(path)
        try:
            yield
        finally:
            self.sim.locks.discard(path)

    def load_release(self, name: str, paths: Paths) -> Release:
        if name not in self.sim.releases:
            raise HostToolError(name, "no such release", "run the deploy", 2)
        return release_of(name)

    def release_names(self, paths: Paths) -> list[str]:
        return sorted(self.sim.releases)


class Clock(Port):
    """Time passes only while a tool sleeps."""

    def monotonic(self) -> float:
        return self.sim.now_s

    def sleep(self, seconds: float, /) -> None:
        due_s = self.sim.next_due_s()
        wait_s = due_s - self.sim.now_s if due_s < NEVER_S else 0.0
        self.sim.call("sleep", lambda: self.sim.pass_time(max(seconds, wait_s, 0.5)))

    def now(self, after_s: float = 0) -> str:
        return f"{int(self.sim.now_s + after_s):09d}"


class Engines(Port):
    def find_artifact_problem(self, release: Release) -> HostToolError | None:
        if release.name in self.sim.incomplete:
            return HostToolError(f"tree of {release.name}", "has no receipt", "deploy again")
        return self.problem_at("parts")

    def find_problem(self, release: Release, paths: Paths) -> HostToolError | None:
        return self.problem_at("parts, GPU and memory")

    def make_room(self, release: Release, host: object, report: Callable[[str], None]) -> None:
        def effect() -> None:
            for name in list(self.sim.engines):
                self.sim.end_engine(SERVE.unit(name))

        self.sim.call("make room", effect, no_answer("memory"))

    def count_unfinished(self, release: Release, paths: Paths) -> float:
        return self.sim.call("unfinished", lambda: 0.0, EngineTimeoutError("no answer in time"))


class Gateway(Port):
    def find_problem(self, release: Release, paths: Paths) -> HostToolError | None:
        return self.problem_at("gateway")

    def start_or_reload(self, release: Release, paths: Paths) -> None:
        def effect() -> None:
            self.sim.links.add(GATEWAY.unit(release.service))
            self.sim.gateway_runs = True

        self.sim.call("bring up", effect, no_answer("gateway"))

    def wait_until_listening(self, service: str, paths: Paths) -> None:
        self.sim.call("listening", error=no_answer("gateway"))

    def close_traffic(self, service: str, paths: Paths) -> None:
        error = OSError(errno.EIO, "I/O error")
        self.sim.call("close", lambda: setattr(self.sim, "open_to", None), error)

    def open_traffic(self, release: Release, paths: Paths) -> None:
        def effect() -> None:
            if release.name not in self.sim.engines:
                raise FileNotFoundError(errno.ENOENT, "No such file", "engine.sock")
            self.sim.open_to = release.name

        self.sim.call("open", effect, OSError(errno.EIO, "I/O error"))


class Check(Port):
    def full(self, release: Release, host: steps.Host, report: Callable[[str], None]) -> Proof:
        def effect() -> Proof:
            run = self.sim.engines.get(release.name)
            self.sim.pass_time(CHECK_S)
            same_run = run is not None and self.sim.engines.get(release.name) == run
            ok = same_run and release.name not in self.sim.broken
            if ok:
                self.sim.proven.add(release.name)
            return self.sim.write_proof(release, "full", ok, host)

        proof: Proof = self.sim.call("full check", effect, no_answer("systemctl show"))
        return proof

    def read_versions(self) -> dict[str, str]:
        return self.sim.call("versions", self.sim.versions)

    def speed(self, release: Release, paths: Paths, report: Callable[[str], None]) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", "x.json")
