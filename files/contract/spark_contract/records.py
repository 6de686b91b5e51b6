"""What a host remembers about its releases: proofs, what is good, what was asked for and stopped.

Times are UTC, as :func:`spark_contract.files.now` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from spark_contract.documents import OPTIONAL, key
from spark_contract.errors import Problem


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; one that is not ``ok`` and weighs ``warn`` is told and ends nothing."""

    name: str
    ok: bool
    detail: str
    seconds: float
    weight: Literal["must", "warn"] = field(default="must", metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class FullCheck:
    """The last full check that was passed."""

    invocation_id: str
    checked_at: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class StartMemory:
    """The least memory that was available on the host while an engine started."""

    lowest_bytes: int
    after_s: float  # since the engine's container was started
    floor_bytes: int  # below it the engine would have been stopped


@dataclass(frozen=True, slots=True)
class CacheCount:
    """The KV cache as the engine itself counted it at its start."""

    tokens: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Proof:
    """What the last check of a release found, bound to one run of its unit."""

    SCHEMA_VERSION: ClassVar[int] = 1

    release: str
    digest: str
    invocation_id: str
    level: str
    ok: bool
    checked_at: str
    checks: tuple[Finding, ...]
    versions: dict[str, str]
    engine: dict[str, str]
    portable: bool
    stubbed: tuple[str, ...]
    last_full: FullCheck | None = None
    bench: dict[str, Any] | None = None  # a measurement of the speed
    start_memory: StartMemory | None = field(default=None, metadata=OPTIONAL)
    # What the engine printed while it loaded and a check demands: journals forget.
    load_lines: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    kv_cache: CacheCount | None = field(default=None, metadata=OPTIONAL)

    @property
    def failed(self) -> list[Finding]:
        """The checks that a right server passes, and this one did not."""
        return [one for one in self.checks if not one.ok and one.weight == "must"]

    @property
    def warnings(self) -> list[Finding]:
        """The checks that were not passed, as may happen to a right server."""
        return [one for one in self.checks if not one.ok and one.weight == "warn"]


@dataclass(frozen=True, slots=True)
class CompileCache:
    """``caches/<release>.json``: its compile cache is whole; written last."""

    SCHEMA_VERSION: ClassVar[int] = 1

    driver: str
    copied_from: str | None  # a release; None: it started empty
    invocation_id: str  # the run of the unit that started with it


@dataclass(frozen=True, slots=True)
class DailyLook:
    """``daily.json``: what the host's daily look found wrong."""

    SCHEMA_VERSION: ClassVar[int] = 1

    at: str
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class GpuProof:
    """``gpu-container.json``: a container that was started in this way saw the GPU."""

    SCHEMA_VERSION: ClassVar[int] = 1

    key: dict[str, str]  # what it depends on
    docker_arguments: tuple[str, ...]  # with these an engine is started
    gpu: str


@dataclass(frozen=True, slots=True)
class Good:
    """The last proven release of a service, and the ways back from it, latest first."""

    SCHEMA_VERSION: ClassVar[int] = 1

    release: str | None = None
    previous: tuple[str, ...] = ()
    at: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """Every release that was proven, latest first."""
        return (*((self.release,) if self.release else ()), *self.previous)


@dataclass(frozen=True, slots=True)
class Stopped:
    """Who stopped a service on purpose; that the file is there keeps the service down."""

    SCHEMA_VERSION: ClassVar[int] = 1

    release: str | None  # what served
    at: str
    by: str | None = field(default=None, metadata=OPTIONAL)
    until: str | None = field(default=None, metadata=OPTIONAL)  # None: until someone starts it


@dataclass(frozen=True, slots=True)
class WayBack:
    """A way back to an earlier release that was asked for, or gone."""

    SCHEMA_VERSION: ClassVar[int] = 1

    state: Literal["asked", "done"]
    came: str | None = field(metadata=key("from"))
    to: str
    at: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a person may want to know of a service, as the watch saw it."""

    at: str
    release: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """The id under which a rollout was last asked for."""

    SCHEMA_VERSION: ClassVar[int] = 1

    id: str
    at: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """How the change of a service to a release stands, and how it ended."""

    SCHEMA_VERSION: ClassVar[int] = 1

    release: str
    started_at: str = ""
    boot_id: str = ""
    # Whose outcome this is: the request that was made, and the unit's run.
    request: str | None = None
    invocation_id: str | None = None
    state: str = "none"
    phase: str | None = None
    progress: str | None = None
    reason: str | None = None
    failed_phase: str | None = None
    log_tail: tuple[str, ...] = ()
    bench: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=(), metadata=OPTIONAL)  # of the check, in sentences
    previous: str | None = None
    serving: str | None = None
    ended_at: str | None = None
    times_s: dict[str, float] = field(default_factory=dict)
