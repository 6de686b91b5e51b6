"""Documents that ``spark-host`` reads and prints: status, rollouts, evidence, cleanup, fabric."""

from dataclasses import astuple, dataclass, field
from typing import ClassVar

from spark_contract.documents import OPTIONAL, json_key
from spark_contract.job import JobState
from spark_contract.records import DailyReport, Event, Proof, RollbackRecord, Stopped
from spark_contract.tool import Problem


@dataclass(frozen=True, slots=True)
class ReleaseState:
    name: str
    model: str
    profile: str
    names: tuple[str, ...]
    active: str  # ActiveState of the unit
    restarts: int
    proof: Proof | None
    unproven: str | None
    speed: tuple[str, ...]  # measurements as text
    change_failed: bool = field(default=False, metadata=OPTIONAL)
    # Compile cache that another release can copy.
    cache: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """Accepted requests of a key, with the bytes of headers and bodies."""

    requests: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    def __add__(self, other: "KeyUsage") -> "KeyUsage":
        return KeyUsage(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Usage:
    SCHEMA_VERSION: ClassVar[int] = 1

    keys: dict[str, KeyUsage]
    counted_bytes: int  # of the gateway's log


@dataclass(frozen=True, slots=True)
class GatewayState:
    active: str
    enabled: bool
    key_problem: str | None
    difference: str | None
    usage: dict[str, KeyUsage] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class RunningRollout:
    release: str
    since: str  # "" if unknown
    phase: str | None


@dataclass(frozen=True, slots=True)
class Service:
    known_good: str | None  # last proven release
    enabled: tuple[str, ...]  # started at boot
    active: str | None
    stopped_by_hand: Stopped | None
    rolled_back: RollbackRecord | None  # rollback that started the current release
    traffic_open: bool
    gateway: GatewayState
    # The head of the cluster, or None if this host answers requests.
    head: str | None = field(default=None, metadata=OPTIONAL)
    rollout: RunningRollout | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class HostMemory:
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class LiveCheck:
    ok: bool
    release: str
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Status:
    SCHEMA_VERSION: ClassVar[int] = 2

    releases: tuple[ReleaseState, ...]
    services: dict[str, Service]
    jobs: tuple[JobState, ...]
    memory: HostMemory
    versions: dict[str, str]
    versions_unknown: tuple[str, ...]
    reboot_pending: str
    live: LiveCheck | None  # None if not requested, or if no engine is running
    events: dict[str, tuple[Event, ...]]  # by service, oldest first
    # Engines of other services.
    more_live: tuple[LiveCheck, ...] = field(default=(), metadata=OPTIONAL)
    daily: DailyReport | None = field(default=None, metadata=OPTIONAL)
    # Drop-ins, masks and unit files that were not written by a deploy.
    unit_overrides: tuple[str, ...] = field(default=(), metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class NamedRelease:
    name: str
    model: str | None
    profile: str | None

    def __str__(self) -> str:
        return f"{self.name} ({self.model} with {self.profile})"


@dataclass(frozen=True, slots=True)
class Rollback:
    """A planned rollback; ``done`` and ``problem`` give the reason if no rollback can start."""

    from_release: NamedRelease | None = field(metadata=json_key("from"))
    to: NamedRelease | None
    done: str | None = field(default=None, metadata=OPTIONAL)
    problem: Problem | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class StartedRollout:
    release: str
    request: str | None
    joined: bool
    from_release: NamedRelease | None = field(
        default=None, metadata={**json_key("from"), **OPTIONAL}
    )
    to: NamedRelease | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class EngineEvidence:
    release: str
    lines: tuple[str, ...] = ()  # log lines about kernels and backends
    times_s: dict[str, float] = field(default_factory=dict)  # for each step of the start
    sizes_bytes: dict[str, int] = field(default_factory=dict)  # as logged
    kv_cache_tokens: int | None = None
    libraries: dict[str, str] = field(default_factory=dict)  # loaded, with versions
    drafted_tokens: int | None = None  # since the start
    accepted_tokens: int | None = None
    generated_tokens: int | None = None
    rollout_state: str | None = None  # of the rollout
    rollout_times_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Numbers, versions and fixed log lines, without anything that identifies a host."""

    SCHEMA_VERSION: ClassVar[int] = 2

    firmware: dict[str, str]  # product, BIOS, fwupd devices
    gpu: dict[str, float]  # current temperature and power
    gpu_container: tuple[str, ...]
    kernel_log: dict[str, int]  # error counts since boot
    engines: tuple[EngineEvidence, ...]


@dataclass(frozen=True, slots=True)
class KeepList:
    """Resources that pruning must keep, because the plan uses them."""

    releases_kept: int  # rollback targets, in addition to active and enabled releases
    releases: tuple[str, ...]
    folders: tuple[str, ...]
    images: tuple[str, ...]
    models_dir: str
    sources_dir: str
    cache_dir: str


@dataclass(frozen=True, slots=True)
class Prunable:
    kind: str  # "release" | "tree" | "source" | "cache" | "image" | "job"
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Pruning:
    items: tuple[Prunable, ...]
    bytes: int
    kept: dict[str, str]  # release -> reason
    unmanaged: tuple[str, ...]  # unmanaged files next to managed ones
    problems: tuple[str, ...]  # failed removals


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources that a host's settings create and an uninstall removes."""

    models_dir: str
    sources_dir: str
    cache_dir: str
    files: tuple[str, ...]
    shared_files: tuple[str, ...]
    daemon_json: str
    daemon_keys: tuple[str, ...]
    masked: tuple[str, ...]
    packages: tuple[str, ...]
    engine_packages: tuple[str, ...]
    gpu_packages: tuple[str, ...]  # the NVIDIA toolkit, CUDA
    docker_users: tuple[str, ...]
    access_files: tuple[str, ...]
    models: bool  # remove checkpoints and sources
    engine: bool  # remove Docker and CUDA if we installed them


@dataclass(frozen=True, slots=True)
class Baseline:
    """The state of a host before the first deploy."""

    at: str
    packages: tuple[str, ...]
    groups: tuple[str, ...]
    masked: tuple[str, ...]
    boot_target: str
    docker_members: tuple[str, ...]
    images: tuple[str, ...]
    directories: tuple[str, ...]  # existing directories that a deploy may create
    files: dict[str, str | None] = field(default_factory=dict)  # of `shared_files`


@dataclass(frozen=True, slots=True)
class ManagedItem:
    kind: str
    name: str
    size_bytes: int = 0
    kept_because: str = ""


@dataclass(frozen=True, slots=True)
class UninstallManifest:
    baseline_at: str | None  # None if there is no baseline
    items: tuple[ManagedItem, ...]
    problems: tuple[str, ...] = ()  # failed removals


NETPLAN_FILE = "/etc/netplan/40-spark-fabric.yaml"
# Overrides the file of the same name until the next boot.
NETPLAN_TRIAL = "/run/netplan/40-spark-fabric.yaml"
REMOVED_NETPLAN = "/var/lib/spark/fabric/removed.yaml"
RESTORE_UNIT = "spark-fabric-return"
APPLY_UNIT = "spark-fabric-apply"
RETRY_FIX = "wait 90 seconds, then run the command again"


@dataclass(frozen=True, slots=True)
class FabricPort:
    interface: str
    address: str
    mtu: int


@dataclass(frozen=True, slots=True)
class FabricPlan:
    SCHEMA_VERSION: ClassVar[int] = 1

    netplan: str
    ports: tuple[FabricPort, ...]
    confirm_s: int


@dataclass(frozen=True, slots=True)
class FabricRecord:
    SCHEMA_VERSION: ClassVar[int] = 1

    ports: tuple[FabricPort, ...]
    mtu_before: dict[str, int]
    # Other interfaces by name; default routes as arguments of `ip route`.
    addresses_before: dict[str, tuple[str, ...]] = field(default_factory=dict, metadata=OPTIONAL)
    routes_before: tuple[str, ...] = field(default=(), metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class SpeedRequest:
    SCHEMA_VERSION: ClassVar[int] = 1

    interface: str
    address: str
    port: int
    token: str
    max_bytes: int
    max_s: float


@dataclass(frozen=True, slots=True)
class SpeedResult:
    SCHEMA_VERSION: ClassVar[int] = 1

    arrived_bytes: int
    took_s: float
