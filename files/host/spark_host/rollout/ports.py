"""Everything a rollout does to a host goes through these ports; tests bring hosts of their own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

from spark_contract.errors import HostToolError
from spark_contract.machine import BOOT_ID
from spark_contract.paths import Paths
from spark_contract.records import Proof
from spark_contract.release import Release

from spark_host.check import runner
from spark_host.engine import serve as engines
from spark_host.gateway import gateway, traffic
from spark_host.system import host as system
from spark_host.system.programs import Report


class Engines(Protocol):
    """See ``engine/serve.py``."""

    def part_problem(self, release: Release) -> HostToolError | None: ...
    def problem(self, release: Release, paths: Paths) -> HostToolError | None: ...
    def make_room(self, release: Release, report: Report) -> None: ...
    def unfinished(self, release: Release, paths: Paths) -> float: ...


class Gateway(Protocol):
    """See ``gateway/gateway.py``."""

    def problem(self, release: Release, paths: Paths) -> HostToolError | None: ...
    def bring_up(self, release: Release, paths: Paths) -> None: ...
    def wait_until_listening(self, service: str, paths: Paths) -> None: ...


class Traffic(Protocol):
    """See ``gateway/traffic.py``."""

    def close(self, service: str, paths: Paths) -> None: ...
    def open_for(self, release: Release, paths: Paths) -> None: ...


class Check(Protocol):
    """See ``check/runner.py``."""

    def full(self, release: Release, host: system.Host, report: Report) -> Proof: ...
    def versions(self) -> dict[str, str]: ...
    def speed(self, release: Release, paths: Paths, report: Report) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Host(system.Host):
    """A host whose services can be changed to other releases, and the run that does it."""

    engines: Engines = engines
    gateway: Gateway = gateway
    traffic: Traffic = traffic
    check: Check = runner
    boot_id: str = ""  # the kernel's id of this boot
    invocation_id: str | None = None  # of the unit that runs us
    exit_status: str | None = None  # with which its main process ended, if it has


def this_host(paths: Paths) -> Host:
    """Return the host we run on."""
    run, status = os.environ.get("INVOCATION_ID"), os.environ.get("EXIT_STATUS")
    return Host(paths, boot_id=boot_id(), invocation_id=run, exit_status=status)


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    with open(BOOT_ID) as source:
        return source.read().strip()
