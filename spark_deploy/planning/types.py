"""The plan of one host: frozen data, the only thing roles and operations receive.

Digests are made from content, so equal inputs give equal names on the host. Sizes are bytes, times
are seconds. Paths are paths on the host, as text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spark_contract.host.paths import GPU_RECEIPT
from spark_contract.serving.gateway import Gateway
from spark_contract.serving.release import Release
from spark_contract.work.images import LayersPlan
from spark_contract.work.orders import BuildPlan, RequantizePlan

from spark_deploy.lockfile.types import LockedSource
from spark_deploy.settings.host import BaseSettings, ExpectSettings, PathSettings
from spark_deploy.settings.secrets import SecretRef
from spark_deploy.settings.sources import (
    DownloadSettings,
    FleetSettings,
    HubSettings,
    ProxySettings,
    RepositorySettings,
)

SUDOERS_PATH = "/etc/sudoers.d/90-spark-deploy"


@dataclass(frozen=True, slots=True)
class PayloadIdentity:
    """What this checkout sends to hosts, by content alone; ``payload/content.py`` has both."""

    tools_digest: str  # files/host and files/checkpoint
    image_context_digest: str  # files/image
    python_requirements: str  # path in the checkout of the hash-pinned wheels list
    quantiser_digest: str = ""  # of the list of AutoRound's wheels


@dataclass(frozen=True, slots=True)
class Way:
    """One way from a host to another member of its cluster."""

    interface: str
    device: str | None
    mtu: int
    speed_mbit_per_s: int | None
    host: str  # the other one
    address: str  # its
    other_mtu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedsPlan(ExpectSettings):
    """What preflight demands of the host before anything is changed."""

    takeover: tuple[str, ...]  # containers we may stop
    allow_memory_holders: tuple[str, ...]  # process names that may keep memory
    allow_containers: tuple[str, ...] = ()  # that serve models or hold the GPU and may stay
    ports: tuple[int, ...]  # must be free or ours
    disk_needed_bytes: tuple[tuple[str, int], ...]  # (path, bytes still to be written at peak)
    disk_reserve_bytes: int
    memory_needed_bytes: int
    memory_total_min_bytes: int
    docker_dir: str = "/var/lib/docker"
    # Images of the plan; once all of them are there, nothing more is written below docker_dir.
    images: tuple[str, ...] = ()
    # Bytes below docker_dir that each engine image takes; one that is there takes no more.
    image_bytes: tuple[tuple[str, int], ...] = ()
    # (path, tree): once the tree is there, nothing more is written to the path.
    disk_done_once_there: tuple[tuple[str, str], ...] = ()
    reboot: str = "report"  # "report" | "allow": what becomes of a pending reboot
    tailscale: bool = False  # the gateway needs this host's address in its tailnet
    # What may lie on the host already: (folder to fill, its files as (sha256, bytes)).
    downloads: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    look_in: tuple[str, ...] = ()  # where the fetcher will look for them
    cluster: tuple[str, ...] = ()  # members, this host among them
    ways: tuple[Way, ...] = ()  # to the other members


@dataclass(frozen=True, slots=True)
class BootstrapPlan:
    """What a new host gets, so that it never asks for a password again."""

    public_key: str  # one line of authorized_keys
    account: str | None = None  # made for deploys; None: the login user is let in
    allowed_from: tuple[str, ...] = ()  # empty: where the login comes from
    sudoers_path: str = SUDOERS_PATH


NJS = "libnginx-mod-http-js"
"""nginx's JavaScript: what chooses among several services by the name of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BasePlan(BaseSettings):
    """Packages and host care that need no GPU, and the folders to own."""

    paths: PathSettings


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """CUDA toolkit: kept when present at ``version``, else installed. Never the driver."""

    version: str  # "13.0"
    package: str
    repositories: tuple[RepositorySettings, ...]
    package_lock_wait_s: int


@dataclass(frozen=True, slots=True)
class DockerPlan:
    """Container engine with the NVIDIA runtime."""

    packages: tuple[str, ...]
    toolkit_packages: tuple[str, ...]
    repositories: tuple[RepositorySettings, ...]
    daemon: dict[str, Any]  # merged into daemon.json
    check_image: str  # pinned reference; a container of it must print a line starting "GPU"
    package_lock_wait_s: int
    receipt_path: str = GPU_RECEIPT
    users: tuple[str, ...] = ()  # in the group docker
    allow_containers: tuple[str, ...] = ()  # that may come up with docker


@dataclass(frozen=True, slots=True)
class ToolsPlan:
    """Our own host tools (files/host, files/checkpoint), installed by content digest."""

    digest: str
    python_requirements: str  # path in the checkout of the hash-pinned wheels list


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
    hub_token: SecretRef | None = None  # for gated repositories; never part of a digest
    proxy: ProxySettings = field(
        default_factory=ProxySettings
    )  # of jobs and image pulls; never part of a digest
    fleet: FleetSettings = field(default_factory=FleetSettings)  # never part of a digest

    @property
    def served(self) -> tuple[ServicePlan, ...]:
        """All services, the main one first: the order in which they are rolled out."""
        return (self, *self.services)
