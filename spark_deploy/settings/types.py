"""Settings of one host as frozen data: the same keys as ``schema/settings.schema.json``.

People type sizes as ``_gib`` and ``_mib``; here they are ``_bytes``. A test compares the fields
with the schema, so neither can gain a key alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SecretRef:
    """Where the controller reads a secret; ``kind`` is env, file, command or generate."""

    kind: str
    value: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PairSettings:
    """A model and a profile by name."""

    model: str
    profile: str


@dataclass(frozen=True, slots=True)
class ReleaseSettings:
    """Ways back."""

    keep: int
    rollback_to: str | None


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Names, gateway and time limits of the service."""

    names: tuple[str, ...]
    port: int
    expose: str
    address: str | None
    tls: str
    tls_certificate: str | None
    tls_key: str | None
    tls_names: tuple[str, ...]
    ca_dir: str
    api_key: SecretRef
    max_body_bytes: int
    max_requests_per_s: int | None
    start_timeout_s: int
    stop_timeout_s: int
    drain_s: int


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Values that replace those of the profile; ``None`` keeps the profile's."""

    max_context_tokens: int | None
    max_sequences: int | None
    memory_fraction: float | None
    kv_cache_bytes: int | None
    vision: bool | None
    options: dict[str, Any]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """How the tree that a profile asks for is kept on the host."""

    layout: str | None
    prebuilt: bool
    keep_base: bool


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The memory pool of a host."""

    total_bytes: int
    reserve_bytes: int
    start_wait_s: int
    floor_bytes: int


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """When a serving engine is restarted."""

    stall_s: int
    interval_s: int
    hot_celsius: int


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """Limits of the proof, and of the measurement after it."""

    timeout_s: int
    bench_s: int
    bench_worse_percent: int


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """How image registries are reached."""

    insecure: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Where model repositories come from."""

    endpoint: str
    mirrors: tuple[str, ...]
    token: SecretRef | None


@dataclass(frozen=True, slots=True)
class DownloadSettings:
    """How hosts fetch model files."""

    parallel: int
    rate_limit_bytes_per_s: int | None
    tries: int
    retry_pause_s: float
    look_in: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RepositorySettings:
    """One signed package repository."""

    url: str
    suite: str
    components: tuple[str, ...]
    key_url: str
    key_sha256: str


@dataclass(frozen=True, slots=True)
class ExpectSettings:
    """What a host must be."""

    arch: str
    pci_ids: tuple[str, ...]
    gpu_name: str
    os_id: str
    os_version: str
    driver_min: str
    dgx_release: str


@dataclass(frozen=True, slots=True)
class BaseSettings:
    """Packages and host care."""

    packages: tuple[str, ...]
    hold_driver_in_unattended_upgrades: bool
    disable_sleep: bool
    protect_login: bool
    headless: bool
    earlyoom: bool


@dataclass(frozen=True, slots=True)
class CudaSettings:
    """CUDA toolkit."""

    version: str
    package: str
    repositories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DockerSettings:
    """Container engine and NVIDIA runtime."""

    packages: tuple[str, ...]
    toolkit_packages: tuple[str, ...]
    repositories: tuple[str, ...]
    daemon: dict[str, Any]
    users: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """Room to keep free."""

    reserve_bytes: int


@dataclass(frozen=True, slots=True)
class PathSettings:
    """Where large data lives on a host."""

    models_dir: str
    sources_dir: str
    cache_dir: str
    docker_dir: str


@dataclass(frozen=True, slots=True)
class SshSettings:
    """How to reach a host."""

    hostname: str | None
    user: str | None
    port: int | None
    key_file: str | None
    config_file: str | None
    known_hosts_file: str | None


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one host, merged and valid."""

    model: str
    profile: str
    keep_ready: tuple[PairSettings, ...]
    releases: ReleaseSettings
    serve: ServeSettings
    engine: EngineSettings
    checkpoint: CheckpointSettings
    memory: MemorySettings
    watch: WatchSettings
    check: CheckSettings
    lock_file: str
    locked: str
    images: dict[str, str]
    registries: RegistrySettings
    hub: HubSettings
    downloads: DownloadSettings
    repositories: dict[str, RepositorySettings]
    expect: ExpectSettings
    takeover: tuple[str, ...]
    reboot: str
    allow_memory_holders: tuple[str, ...]
    base: BaseSettings
    cuda: CudaSettings
    docker: DockerSettings
    disk: DiskSettings
    paths: PathSettings
    ssh: SshSettings
    sudo: bool

    @property
    def ready_pairs(self) -> tuple[PairSettings, ...]:
        """Return the pairs to have ready, without the one that is served."""
        served = PairSettings(self.model, self.profile)
        return tuple(pair for pair in dict.fromkeys(self.keep_ready) if pair != served)

    def of_pair(self, pair: PairSettings) -> Settings:
        """Return these settings as they would be with another pair to serve."""
        return dataclasses.replace(self, model=pair.model, profile=pair.profile)
