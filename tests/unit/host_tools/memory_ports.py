"""Simulated ports of a host; each call passes :class:`memory_host.Model`."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory_systemd import release_of
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.records import Proof
from spark_contract.release import Release
from spark_contract.units import GATEWAY, SERVE, SWITCH
from spark_host.engine.client import SilentError
from spark_host.rollout import steps

CHECK_S = 3.0


def refused(where: str) -> HostToolError:
    return HostToolError(where, "did not answer", "run again")


@dataclass
class MemoryPort:
    """A port of the host."""

    model: Any


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
            elif not unit.endswith(".timer"):
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
        # Skip to the next event.
        due_s = min((unit.due_s for unit in self.model.units.values()), default=0.0)
        wait_s = due_s - self.model.at_s if due_s < float("inf") else 0.0
        self.model.call("sleep", lambda: self.model.pass_time(max(seconds, wait_s, 0.5)))

    def now(self, after_s: float = 0) -> str:
        return f"{int(self.model.at_s + after_s):09d}"


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
    def full(self, release: Release, host: steps.Host, report: Callable[[str], None]) -> Proof:
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

    def read_versions(self) -> dict[str, str]:
        return self.model.call("versions", self.model.versions)

    def speed(self, release: Release, paths: Paths, report: Callable[[str], None]) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", "x.json")
