"""Documents that `spark-host` returns: status, rollbacks, evidence, pruning, uninstall."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from spark_contract.documents import OPTIONAL, key
from spark_contract.errors import Problem
from spark_contract.job import JobState
from spark_contract.records import DailyLook, Event, Proof, Stopped, WayBack


@dataclass(frozen=True, slots=True)
class ReleaseState:
    """A release that lies on the host: what it serves, how it runs, how well that is proven."""

    name: str
    model: str
    profile: str
    names: tuple[str, ...]
    active: str  # the state of its unit, as systemd calls it
    restarts: int
    proof: Proof | None
    unproven: str | None  # why the proof does not cover what runs now
    speed: tuple[str, ...]  # what was measured, in sentences
    # The last change to it ended as a failed unit, whatever has become of the release since.
    change_failed: bool = field(default=False, metadata=OPTIONAL)
    # It was proven and its compile cache is of the loaded driver; a candidate starts with a copy.
    cache: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class GatewayState:
    """How a service's gateway runs, and how it differs from its settings."""

    active: str
    enabled: bool
    key_problem: str | None
    difference: str | None


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A change that systemd is carrying out on the host, whoever watches it."""

    release: str
    since: str  # "" where nobody wrote it down
    phase: str | None  # None: it waits for its turn


@dataclass(frozen=True, slots=True)
class Service:
    """What is known of one service; releases by name."""

    good: str | None  # the last that was proven
    enabled: tuple[str, ...]  # what a boot starts
    active: str | None
    stopped_by_hand: Stopped | None
    rolled_back: WayBack | None  # the way back that brought the current release
    traffic_open: bool
    gateway: GatewayState
    # The host of a cluster that answers for what runs here; None: this host does itself.
    head: str | None = field(default=None, metadata=OPTIONAL)
    rollout: UnderWay | None = field(default=None, metadata=OPTIONAL)


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

    SCHEMA_VERSION: ClassVar[int] = 2

    releases: tuple[ReleaseState, ...]
    services: dict[str, Service]
    jobs: tuple[JobState, ...]
    memory: HostMemory
    versions: dict[str, str]
    versions_unknown: tuple[str, ...]
    reboot_pending: str
    live: Live | None  # None: not asked, or nothing runs
    events: dict[str, tuple[Event, ...]]  # by service, oldest first
    # Of further engines, where a host has several services.
    more_live: tuple[Live, ...] = field(default=(), metadata=OPTIONAL)
    daily: DailyLook | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class NamedRelease:
    """A release in people's words; ``None`` for what cannot be read of it."""

    name: str
    model: str | None
    profile: str | None

    def __str__(self) -> str:
        return f"{self.name} ({self.model} with {self.profile})"


@dataclass(frozen=True, slots=True)
class Rollback:
    """Where a way back leads: ``done`` when it is gone already, ``problem`` when it cannot be."""

    came: NamedRelease | None = field(metadata=key("from"))
    to: NamedRelease | None
    done: str | None = field(default=None, metadata=OPTIONAL)
    problem: Problem | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class Begun:
    """A rollout that was asked for, or joined; of a way back also where it leads."""

    release: str
    request: str | None
    joined: bool
    came: NamedRelease | None = field(default=None, metadata={**key("from"), **OPTIONAL})
    to: NamedRelease | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class EngineEvidence:
    """What one run of an engine said of itself, counted, and holds in memory."""

    release: str
    lines: tuple[str, ...] = ()  # in which it names kernels and backends
    times_s: dict[str, float] = field(default_factory=dict)  # of its start, by step
    sizes_bytes: dict[str, int] = field(default_factory=dict)  # as it counted them
    kv_cache_tokens: int | None = None
    libraries: dict[str, str] = field(default_factory=dict)  # in its processes, with versions
    drafted_tokens: int | None = None  # since it started
    accepted_tokens: int | None = None
    generated_tokens: int | None = None
    rollout_state: str | None = None  # of the rollout that brought it
    rollout_times_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a host shows beyond its status: ``spark-host evidence``.

    It is made to be sent to others, so it holds numbers, versions and the engine's own fixed
    words: never what somebody asked or was answered, and nothing that tells one host from another.
    """

    SCHEMA_VERSION: ClassVar[int] = 2

    firmware: dict[str, str]  # product, BIOS, parts that fwupd names
    gpu: dict[str, float]  # temperature and power now
    gpu_container: tuple[str, ...]  # arguments with which a container saw the GPU; () never did
    kernel_log: dict[str, int]  # how often it tells of trouble since the boot
    engines: tuple[EngineEvidence, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """All that the plan of a host uses, and where things lie that may go."""

    releases_kept: int  # ways back, beside those that serve or boot
    releases: frozenset[str]
    folders: frozenset[str]
    images: frozenset[str]
    models_dir: str
    sources_dir: str
    cache_dir: str


@dataclass(frozen=True, slots=True)
class Prunable:
    """One thing that goes, and what that gives back."""

    kind: str  # "release" | "tree" | "source" | "cache" | "image" | "job"
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Pruning:
    """What a prune removes, and why the rest stays."""

    items: tuple[Prunable, ...]
    bytes: int
    kept: dict[str, str]  # release -> why
    not_ours: tuple[str, ...]  # beside ours
    problems: tuple[str, ...]  # what could not be removed


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the settings of a host would make there, and how much of it shall go."""

    models_dir: str
    sources_dir: str
    cache_dir: str
    files: tuple[str, ...]  # ours alone, wherever they lie
    shared_files: tuple[str, ...]  # somebody may have had them before
    daemon_json: str
    daemon_keys: tuple[str, ...]  # keys in it that are ours
    masked: tuple[str, ...]
    packages: tuple[str, ...]
    engine_packages: tuple[str, ...]  # Docker
    gpu_packages: tuple[str, ...]  # the NVIDIA toolkit, CUDA
    docker_users: tuple[str, ...]
    access_files: tuple[str, ...]  # how this project logs in
    models: bool  # trees and sources go, too
    engine: bool  # what was installed of Docker and CUDA goes, too


@dataclass(frozen=True, slots=True)
class Before:
    """A host as it was before the first deploy changed it."""

    at: str
    packages: tuple[str, ...]
    groups: tuple[str, ...]
    masked: tuple[str, ...]
    boot_target: str
    docker_members: tuple[str, ...]
    images: tuple[str, ...]  # ids
    directories: tuple[str, ...]  # of those that a deploy, or a package of it, may make
    files: dict[str, str | None] = field(default_factory=dict)  # of `shared_files`


@dataclass(frozen=True, slots=True)
class Thing:
    """One thing of ours on a host; with ``stays`` it is left there, for that reason."""

    kind: str
    name: str
    size_bytes: int = 0
    stays: str = ""


@dataclass(frozen=True, slots=True)
class Ours:
    """Everything of ours on a host, in the order in which it goes."""

    noted_at: str | None  # when `Before` was written; None: nobody did
    things: tuple[Thing, ...]
    problems: tuple[str, ...] = ()  # what could not be removed
