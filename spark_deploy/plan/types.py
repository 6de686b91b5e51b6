"""The plan of one host: frozen data, the only thing roles and operations receive.

Digests are made from content, so equal inputs give equal names on the host. Sizes are bytes, times
are seconds. Paths are paths on the host, as text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spark_contract.gateway import Gateway
from spark_contract.images import LayersPlan
from spark_contract.orders import BuildPlan, RequantizePlan
from spark_contract.release import Release

from spark_deploy.config.settings.host import PathSettings
from spark_deploy.config.settings.secrets import SecretRef
from spark_deploy.config.settings.sources import (
    DownloadSettings,
    FleetSettings,
    HubSettings,
    ProxySettings,
)
from spark_deploy.lock.types import LockedSource
from spark_deploy.plan.machine import BasePlan, CudaPlan, DockerPlan, NeedsPlan, ToolsPlan


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """One repository at one commit, fetched whole."""

    locked: LockedSource
    dir: str  # on the host
    hub: HubSettings
    downloads: DownloadSettings

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tree."""
        return self.locked.size_bytes

    @property
    def digest(self) -> str:
        """Identity of the tree's content (not of where it comes from)."""
        return self.locked.digest

    @property
    def revision(self) -> str:
        """What its receipt names."""
        return self.locked.commit


class _Made:
    """A tree that a job makes by its order."""

    __slots__ = ()
    order: RequantizePlan | BuildPlan

    @property
    def dir(self) -> str:
        """Where the tree will be on the host."""
        return self.order.out

    @property
    def digest(self) -> str:
        """Identity of everything the tree is made from."""
        return self.order.digest


@dataclass(frozen=True, slots=True)
class RequantizedPlan(_Made):
    """An INT4 tree made here from a 16-bit repository; a base like a fetched one."""

    order: RequantizePlan
    original: SourcePlan
    calibration: str  # the text that it is tuned with
    size_bytes: int  # computed from the architecture

    @property
    def revision(self) -> str:
        """What its receipt names."""
        return self.order.digest


@dataclass(frozen=True, slots=True)
class CheckpointPlan(_Made):
    """The hybrid checkpoint to build."""

    order: BuildPlan
    base: SourcePlan | RequantizedPlan
    donor: LockedSource | None
    output_bytes: int  # new bytes on disk (overlay: the small shard only)
    donor_bytes: int  # of the swapped tensors, read as ranges
    keep_base: bool  # False: the base is removed once the tree is proven and serves


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The engine image: a base by digest, unchanged or with our plugin layer."""

    base: str  # name@sha256:...
    tag: str  # local name: spark-vllm:<digest12>; the base where it is unchanged
    digest: str  # of the inputs
    context_digest: str  # content of files/image
    plugin: bool
    size_bytes: int
    layers: LayersPlan  # the base's, for when hosts lend it


@dataclass(frozen=True, slots=True)
class BesidePlan:
    """A repository that the engine reads beside the tree, and where it sees it."""

    source: SourcePlan
    target: str


@dataclass(frozen=True, slots=True)
class PairPlan:
    """Everything one model and profile need on a host before their engine can start."""

    model: str
    profile: str
    sources: tuple[SourcePlan, ...]  # only those fetched whole
    checkpoint: CheckpointPlan | None  # None: the base tree is served as it is
    image: ImagePlan
    cache_dir: str
    beside: tuple[BesidePlan, ...] = field(default=(), kw_only=True)  # part of the sources
    requantized: RequantizedPlan | None = field(default=None, kw_only=True)  # None: fetched

    @property
    def fetched(self) -> tuple[SourcePlan, ...]:
        """The sources that jobs of their own fetch, and that stay: not what is quantised."""
        made = self.requantized
        return tuple(one for one in self.sources if made is None or one is not made.original)

    @property
    def tree(self) -> CheckpointPlan | RequantizedPlan | SourcePlan:
        """The tree the engine loads."""
        return self.checkpoint or self.requantized or self.sources[0]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How one host's unified memory is spent."""

    total_bytes: int
    reserve_bytes: int
    weights_bytes: int
    drafter_bytes: int
    vision_bytes: int  # part of weights_bytes
    graphs_bytes: int
    kv_cache_bytes: int
    block_tokens: int  # one cache block holds one GDN state, so it is this many tokens
    kv_tokens: int | None  # None: nobody knows what a token takes, or nothing is kept
    full_context_users: float | None  # blocks there are / blocks of one request of full length
    needed_bytes: int  # MemAvailable required before start
    floor_bytes: int  # spark-watch stops the engine below this
    memory_fraction: float  # as handed to the engine
    unknown: tuple[str, ...] = ()  # what could not be computed, and why
    counted_by: str = ""  # who counted a token of a cache that nobody could compute

    @property
    def engine_bytes(self) -> int:
        """What the engine takes before its cache."""
        return self.weights_bytes + self.drafter_bytes + self.graphs_bytes

    @property
    def left_bytes(self) -> int:
        """What is left for all else."""
        return self.total_bytes - self.engine_bytes - self.kv_cache_bytes

    def counted_tokens(self, longest: int) -> int | None:
        """Tokens of the cache as the engine counts: requests of full length, each with a state."""
        return None if self.full_context_users is None else int(self.full_context_users * longest)


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes on the filesystem of ``path``: after the run, and the highest on the way."""

    path: str
    what: str
    peak_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True)
class TlsPlan:
    """Where the gateway's certificate comes from; paths are on the controller."""

    mode: str  # "own-cert" | "private-ca"
    certificate: str  # own-cert
    key: str  # own-cert
    ca_dir: str  # private-ca
    names: tuple[str, ...]  # names and addresses to cover; clients use the first


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """The only way in. It belongs to the service: no change of it restarts the engine."""

    settings: Gateway
    address: str | None  # what clients of the network call the host
    key: SecretRef  # kind "generate": the host makes it once
    tls: TlsPlan | None


@dataclass(frozen=True, slots=True)
class ScheduledPlan:
    """A time at which the host changes to a release by itself."""

    at: str  # as systemd.time writes it
    release: Release


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan(PairPlan):
    """One service of a host: what its pair needs, and how it is served and reached."""

    memory: MemoryPlan
    serve: Release
    gateway: GatewayPlan
    warnings: tuple[str, ...]
    schedule: tuple[ScheduledPlan, ...] = ()  # of the main one


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan(ServicePlan):
    """All there is to do on one host: what its main service needs, and everything around it."""

    host: str
    paths: PathSettings
    needs: NeedsPlan
    base: BasePlan
    cuda: CudaPlan
    docker: DockerPlan
    tools: ToolsPlan
    disk: tuple[DiskUse, ...]
    ready: tuple[PairPlan, ...] = ()  # other pairs to have ready
    services: tuple[ServicePlan, ...] = ()  # beside the main one
    releases_kept: int = 0  # ways back that pruning leaves
    proxy: ProxySettings = field(
        default_factory=ProxySettings
    )  # of jobs and image pulls; never part of a digest
    fleet: FleetSettings = field(default_factory=FleetSettings)  # never part of a digest

    @property
    def served(self) -> tuple[ServicePlan, ...]:
        """All services, the main one first: the order in which they are rolled out."""
        return (self, *self.services)
