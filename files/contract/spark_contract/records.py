"""State files of a host: proofs, known-good releases, rollouts, stops.

Times are UTC, see :func:`spark_contract.files.now`.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from spark_contract.documents import OPTIONAL, json_key
from spark_contract.tool import Problem


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result; a failed check with severity ``warn`` is only a warning."""

    name: str
    ok: bool
    detail: str
    seconds: float
    severity: Literal["must", "warn"] = field(default="must", metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class FullCheck:
    invocation_id: str
    checked_at: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class StartMemory:
    lowest_bytes: int
    after_s: float  # since the container started
    floor_bytes: int  # the watchdog stops the engine below this value


@dataclass(frozen=True, slots=True)
class CacheCount:
    tokens: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Proof:
    """The last check of a release, valid for a single run of the unit."""

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
    bench: dict[str, Any] | None = None  # speed measurement
    start_memory: StartMemory | None = field(default=None, metadata=OPTIONAL)
    # Duration of each phase of the engine's start.
    start_times_s: dict[str, float] = field(default_factory=dict, metadata=OPTIONAL)
    # Stored for later checks, because journals are rotated.
    load_lines: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    kv_cache: CacheCount | None = field(default=None, metadata=OPTIONAL)

    @property
    def failed(self) -> list[Finding]:
        return [check for check in self.checks if not check.ok and check.severity == "must"]

    @property
    def warnings(self) -> list[Finding]:
        return [check for check in self.checks if not check.ok and check.severity == "warn"]


@dataclass(frozen=True, slots=True)
class CompileCache:
    """``caches/<release>.json``: marks a complete compile cache; written last."""

    SCHEMA_VERSION: ClassVar[int] = 1

    driver: str
    copied_from: str | None  # release, or None if the cache started empty
    invocation_id: str  # run of the unit that used the cache
    boot_id: str = field(default="", metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class DailyReport:
    SCHEMA_VERSION: ClassVar[int] = 1

    at: str
    problems: tuple[Problem, ...]
    next_part: int = field(default=0, metadata=OPTIONAL)  # part of the checkpoints to hash next
    damaged_parts: tuple[str, ...] = field(default=(), metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class GpuProof:
    """``gpu-container.json``: a container with these arguments can use the GPU."""

    SCHEMA_VERSION: ClassVar[int] = 1

    key: dict[str, str]  # installed versions for which the proof is valid
    docker_arguments: tuple[str, ...]  # for engines
    gpu: str


@dataclass(frozen=True, slots=True)
class KnownGoodReleases:
    """The last proven release, and earlier ones as rollback targets, latest first."""

    SCHEMA_VERSION: ClassVar[int] = 1

    release: str | None = None
    previous: tuple[str, ...] = ()
    at: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.release, *self.previous) if self.release else self.previous


@dataclass(frozen=True, slots=True)
class Stopped:
    """A deliberate stop; the service stays stopped while the file exists."""

    SCHEMA_VERSION: ClassVar[int] = 1

    release: str | None  # running before the stop
    at: str
    by: str | None = field(default=None, metadata=OPTIONAL)
    until: str | None = field(default=None, metadata=OPTIONAL)  # None means until a manual start
    on_request: bool = field(
        default=False, metadata=OPTIONAL
    )  # the next request starts the service


@dataclass(frozen=True, slots=True)
class RollbackRecord:
    SCHEMA_VERSION: ClassVar[int] = 1

    state: Literal["asked", "done"]
    from_release: str | None = field(metadata=json_key("from"))
    to: str
    at: str


@dataclass(frozen=True, slots=True)
class Event:
    at: str
    release: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    SCHEMA_VERSION: ClassVar[int] = 1

    id: str
    at: str


@dataclass(frozen=True, slots=True)
class Rollout:
    SCHEMA_VERSION: ClassVar[int] = 1

    release: str
    started_at: str = ""
    boot_id: str = ""
    # The request and the unit's run that this result belongs to.
    request: str | None = None
    invocation_id: str | None = None
    state: str = "none"
    phase: str | None = None
    progress: str | None = None
    reason: str | None = None
    failed_phase: str | None = None
    log_tail: tuple[str, ...] = ()
    bench: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=(), metadata=OPTIONAL)  # of the check
    previous: str | None = None
    serving: str | None = None
    ended_at: str | None = None
    times_s: dict[str, float] = field(default_factory=dict)
