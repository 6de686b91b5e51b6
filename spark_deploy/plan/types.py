"""The plan of a host: frozen data for roles and operations.

Digests follow from content. Sizes are bytes, times are seconds, paths refer to the host unless
noted.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_contract.builder_api import BuildPlan, RankPlan, RequantizePlan
from spark_contract.fetching import LayersPlan
from spark_contract.gateway import Gateway
from spark_contract.release import Release

from spark_deploy.config.settings.host import BaseSettings, ExpectSettings, PathSettings
from spark_deploy.config.settings.patterns import SecretRef
from spark_deploy.config.settings.sources import (
    DownloadSettings,
    FleetSettings,
    HubSettings,
    ProxySettings,
    RepositorySettings,
)
from spark_deploy.lock.types import LockedSource

SUDOERS_PATH = "/etc/sudoers.d/90-spark-deploy"
NJS = "libnginx-mod-http-js"
"""nginx's JavaScript module; routes requests to several services by model name."""


@dataclass(frozen=True, slots=True)
class ManagedFile:
    """A regular file that we own on a host; owner root:root."""

    path: str
    content: bytes = field(repr=False)  # may be a secret
    mode: int = 0o644

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class FileState:
    mode: int
    owner: str
    sha256: str


def outdated_files(
    files: Iterable[ManagedFile], states: dict[str, FileState]
) -> tuple[ManagedFile, ...]:
    """Return the files that are missing on the host or differ in content, mode or owner."""
    return tuple(
        file
        for file in files
        if states.get(file.path) != FileState(file.mode, "root:root", file.sha256)
    )


@dataclass(frozen=True, slots=True)
class PayloadIdentity:
    tools_digest: str
    image_context_digest: str
    python_requirements: str  # path in the checkout of the hash-pinned wheels list
    quantizer_digest: str = ""  # of the list of AutoRound's wheels


# A cage of a Spark's ConnectX-7 has two interfaces, each with an RDMA device; which of the four
# names is cabled differs from host to host.
@dataclass(frozen=True, slots=True)
class Port:
    interface: str
    up: bool
    mtu: int
    speed_mbit_per_s: int | None
    addresses: tuple[str, ...]  # IPv4 with prefix length: 192.168.100.10/24
    device: str | None
    gid_index: int | None  # of RoCE version 2 with the first address


@dataclass(frozen=True, slots=True)
class Ports:
    ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class FabricLink:
    interface: str
    device: str | None
    mtu: int
    speed_mbit_per_s: int | None
    host: str  # the other member
    address: str  # of the other member
    other_mtu: int


@dataclass(frozen=True, slots=True)
class SourcePlan:
    locked: LockedSource
    dir: str
    hub: HubSettings
    downloads: DownloadSettings

    @property
    def size_bytes(self) -> int:
        return self.locked.size_bytes

    @property
    def digest(self) -> str:
        """Identity of the content, independent of the hub."""
        return self.locked.digest


@dataclass(frozen=True, slots=True)
class RequantizedPlan:
    """An INT4 checkpoint made from a 16-bit repository on the host."""

    build: RequantizePlan
    original: SourcePlan
    calibration: str  # the calibration text itself
    size_bytes: int

    @property
    def dir(self) -> str:
        return self.build.out

    @property
    def digest(self) -> str:
        return self.build.digest


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    build: BuildPlan
    base: SourcePlan | RequantizedPlan
    donor: LockedSource | None
    output_bytes: int  # new bytes on disk (overlay: the small shard only)
    donor_bytes: int  # of the swapped tensors, read as ranges
    keep_base: bool  # False: remove the base once the checkpoint is proven

    @property
    def dir(self) -> str:
        return self.build.out

    @property
    def digest(self) -> str:
        return self.build.digest


@dataclass(frozen=True, slots=True)
class ImagePlan:
    base: str  # name@sha256:...
    tag: str  # local name spark-vllm:<digest12>; equals base without the plugin
    digest: str
    context_digest: str  # content of files/image
    plugin: bool
    size_bytes: int
    layers: LayersPlan  # of the base, for peer download


@dataclass(frozen=True, slots=True)
class VocabularyPlan:
    """The tokens that the drafter chooses from: the most frequent ones of a text."""

    order: RankPlan
    text: str


@dataclass(frozen=True, slots=True)
class CompanionPlan:
    source: SourcePlan
    target: str


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Files and image of a model with a profile."""

    model: str
    profile: str
    sources: tuple[SourcePlan, ...]
    checkpoint: CheckpointPlan | None  # None: the base is served unchanged
    image: ImagePlan
    cache_dir: str
    companions: tuple[CompanionPlan, ...] = field(default=(), kw_only=True)  # also in sources
    requantized: RequantizedPlan | None = field(default=None, kw_only=True)
    vocabulary: VocabularyPlan | None = field(default=None, kw_only=True)

    @property
    def fetched(self) -> tuple[SourcePlan, ...]:
        """The sources with a fetch job; the requantize job downloads the 16-bit repository."""
        original = self.requantized and self.requantized.original
        return tuple(source for source in self.sources if source is not original)

    @property
    def served_checkpoint(self) -> CheckpointPlan | RequantizedPlan | SourcePlan:
        return self.checkpoint or self.requantized or self.sources[0]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    total_bytes: int
    reserve_bytes: int
    weights_bytes: int
    drafter_bytes: int
    vision_bytes: int
    graphs_bytes: int
    kv_cache_bytes: int
    block_tokens: int  # large enough for a GDN state
    kv_tokens: int | None  # None: unknown, or no cache
    full_context_users: float | None  # total blocks / blocks of a full-length request
    needed_bytes: int  # MemAvailable required before start
    floor_bytes: int  # spark-watch stops the engine below this
    memory_fraction: float  # gpu_memory_utilization
    unknown: tuple[str, ...] = ()  # values that could not be computed, and why
    measured_by: str = ""  # source of a measured cache size

    @property
    def engine_bytes(self) -> int:
        return self.weights_bytes + self.drafter_bytes + self.graphs_bytes

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.engine_bytes - self.kv_cache_bytes

    def counted_tokens(self, request_tokens: int) -> int | None:
        """Return the cache's capacity as the engine counts it, with all requests at full length."""
        users = self.full_context_users
        return None if users is None else int(users * request_tokens)


@dataclass(frozen=True, slots=True)
class DiskUse:
    path: str
    label: str
    peak_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True)
class TlsPlan:
    """Source of the gateway's certificate; paths are on the controller."""

    mode: str  # "own-cert" | "private-ca"
    certificate: str
    key: str
    ca_dir: str  # private-ca
    names: tuple[str, ...]  # names and addresses to cover; clients use the first


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """The only network access. It belongs to the service, so a change never restarts the engine."""

    settings: Gateway
    address: str | None  # the host's address for network clients
    key: SecretRef  # kind "generate": the host generates it once
    tls: TlsPlan | None


@dataclass(frozen=True, slots=True)
class ScheduledPlan:
    at: str  # OnCalendar expression of systemd
    release: Release


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan(ModelPlan):
    memory: MemoryPlan
    release: Release
    gateway: GatewayPlan
    warnings: tuple[str, ...]
    schedule: tuple[ScheduledPlan, ...] = ()  # main service only


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightPlan:
    expect: ExpectSettings
    takeover: tuple[str, ...]  # containers we may stop
    allow_memory_holders: tuple[str, ...]
    allow_containers: tuple[str, ...] = ()  # GPU containers that may keep running
    ports: tuple[int, ...]
    gateways: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # service -> ports
    disk_needed_bytes: tuple[tuple[str, int], ...]
    disk_reserve_bytes: int
    memory_needed_bytes: int
    memory_total_min_bytes: int
    # Images of the plan; if all are present, DOCKER_DIR needs no more space.
    images: tuple[str, ...] = ()
    # Bytes below DOCKER_DIR for each engine image that is missing.
    image_bytes: tuple[tuple[str, int], ...] = ()
    # (path, checkpoint): if the checkpoint exists, the path needs no more space.
    skip_disk_if_present: tuple[tuple[str, str], ...] = ()
    reboot: str = "report"  # "report" | "allow" a pending reboot
    tailscale: bool = False  # the gateway needs the host's tailnet address
    downloads: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    look_in: tuple[str, ...] = ()  # where the fetcher searches for them
    cluster: tuple[str, ...] = ()
    links: tuple[FabricLink, ...] = ()


@dataclass(frozen=True, slots=True)
class BootstrapPlan:
    public_key: str  # line of authorized_keys; "": this machine, no login needed
    account: str | None = None  # created for deploys; None: use the login user
    allowed_from: tuple[str, ...] = ()  # empty: the address of the login
    sudoers_path: str = SUDOERS_PATH


@dataclass(frozen=True, slots=True, kw_only=True)
class BasePlan:
    """Packages and host settings that need no GPU, and the folders to create."""

    settings: BaseSettings
    packages: tuple[str, ...]
    paths: PathSettings


@dataclass(frozen=True, slots=True)
class CudaPlan:
    version: str
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
    check_image: str  # by digest; a container of it must print a line starting "GPU"
    package_lock_wait_s: int
    users: tuple[str, ...] = ()  # in the group docker
    allow_containers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan(ServicePlan):
    host: str
    paths: PathSettings
    preflight: PreflightPlan
    base: BasePlan
    cuda: CudaPlan
    docker: DockerPlan
    payload: PayloadIdentity
    disk: tuple[DiskUse, ...]
    ready: tuple[ModelPlan, ...] = ()
    services: tuple[ServicePlan, ...] = ()
    releases_kept: int = 0  # rollback targets that pruning keeps
    # For jobs and image pulls; digests exclude both.
    proxy: ProxySettings = field(default_factory=ProxySettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)

    @property
    def served(self) -> tuple[ServicePlan, ...]:
        return (self, *self.services)
