"""What ``spark-host status`` tells of a host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from spark_contract.documents import key
from spark_contract.job import JobState
from spark_contract.records import Stopped


@dataclass(frozen=True, slots=True)
class Tools:
    """Which host tools answer."""

    digest: str | None


@dataclass(frozen=True, slots=True)
class KnownRelease:
    """A release that lies on the host."""

    name: str
    service: str
    digest: str
    model: str
    profile: str
    names: tuple[str, ...]
    tree: str
    image: str


@dataclass(frozen=True, slots=True)
class ServeUnit:
    """The unit of a release, as systemd sees it."""

    release: str
    active: str
    sub: str
    enabled: bool
    invocation_id: str | None
    restarts: int
    result: str
    main_pid: int
    since: str | None


@dataclass(frozen=True, slots=True)
class GatewayState:
    """How a service's gateway runs, and how it differs from its settings."""

    active: str
    enabled: bool
    key_problem: str | None
    difference: str | None


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The way back that brought the current release."""

    source: str | None = field(metadata=key("from"))
    to: str
    at: str


@dataclass(frozen=True, slots=True)
class Service:
    """What is known of one service; releases by name."""

    good: str | None  # the last that was proven
    previous: tuple[str, ...]  # those before, the latest first
    enabled: tuple[str, ...]  # what a boot starts
    active: str | None
    stopped_by_hand: Stopped | None
    rolled_back: RolledBack | None
    door_open: bool
    gateway: GatewayState


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the host."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Live:
    """The outcome of one short question to a running engine."""

    ok: bool
    release: str
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Status:
    """Everything a controller asks of a host."""

    SCHEMA_VERSION: ClassVar[int] = 1

    tools: Tools
    releases: tuple[KnownRelease, ...]
    serve: tuple[ServeUnit, ...]
    services: dict[str, Service]
    proofs: dict[str, dict[str, Any]]  # by release: the proof, whether it is current, why not
    switch: dict[str, dict[str, Any]]  # by release: how the last change to it stands
    jobs: tuple[JobState, ...]
    memory: HostMemory
    versions: dict[str, str]
    versions_unknown: tuple[str, ...]
    reboot_pending: str
    live: Live | None  # None: not asked, or nothing runs
    events: dict[str, tuple[dict[str, Any], ...]]  # by service, oldest first
    boot_id: str
