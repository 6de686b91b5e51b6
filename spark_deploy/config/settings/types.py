"""All settings of a host, in the order that ``group_vars/all.yml`` shows them.

Each stands once: type, default, meaning and limits where it is declared, rules between settings in
``broken`` beside them. ``make docs`` writes schema, reference page and ``all.yml`` from it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from spark_deploy.config.documents.declare import Gib, Text, about, knowing_keys, section, setting
from spark_deploy.config.settings.cluster import ClusterSettings, FabricSettings, ReplicasSettings
from spark_deploy.config.settings.engine.engine import EngineSettings
from spark_deploy.config.settings.host import (
    BaseSettings,
    CudaSettings,
    DiskSettings,
    DockerSettings,
    ExpectSettings,
    PathSettings,
    SshSettings,
)
from spark_deploy.config.settings.rules import BELOW, CONTAINER, IMAGE, IMAGE_ROLE, RAIL_NAME
from spark_deploy.config.settings.service import (
    CATALOG_NAME,
    CheckpointSettings,
    CheckSettings,
    MemorySettings,
    PairSettings,
    ReleaseSettings,
    RequantizeSettings,
    RolloutSettings,
    ScheduledSettings,
    ServeSettings,
    WatchSettings,
)
from spark_deploy.config.settings.services import SERVICE_NAME, ServiceSettings
from spark_deploy.config.settings.sources import (
    REPOSITORY_NAME,
    DownloadSettings,
    FleetSettings,
    HubSettings,
    ProxySettings,
    RegistrySettings,
    RepositorySettings,
)

# Options of one command. Its deploy takes them as `--data`; settings files need none of them.
COMMAND_FLAGS = frozenset({
    "releases.rollback_to", "fabric.measure", "fabric.restore", "uninstall.models",
    "uninstall.engine", "requantize.iters", "requantize.nsamples", "requantize.seqlen",
    "requantize.batch", "requantize.calibration",
})  # fmt: skip
# Settings that most hosts never change; `--data` and settings files accept them like all others.
EXPERT = frozenset({
    "locked", "lock_file", "registries.insecure", "override_rails", "allow_memory_holders",
    "rollout.canary", "releases.keep", "serve.max_body_mib", "serve.max_requests_per_s",
    "serve.max_connections", "serve.start_timeout_s", "serve.stop_timeout_s", "serve.drain_s",
    "serve.ca_dir", "serve.tls_names", "engine.options", "engine.environment",
    "engine.memory_fraction", "engine.chat_template", "engine.head", "checkpoint.layout",
    "checkpoint.prebuilt", "checkpoint.keep_base", "cluster.port", "cluster.join_s",
    "cluster.subnet", "replicas.port", "replicas.addresses", "fabric.networks",
    "fabric.interfaces", "fabric.mtu", "fabric.confirm_s", "memory.total_gib",
    "memory.start_wait_s", "memory.floor_gib", "watch.stall_s", "watch.interval_s",
    "watch.hot_celsius", "check.timeout_s", "check.bench_s", "check.bench_worse_percent",
    "downloads.parallel", "downloads.tries", "downloads.retry_pause_s", "downloads.outage_s",
    "downloads.look_in", "fleet.address", "fleet.port", "repositories", "expect.arch",
    "expect.pci_ids", "expect.gpu_name", "expect.os_id", "expect.os_version", "expect.driver_min",
    "expect.dgx_release", "expect.updates", "base.packages", "base.package_lock_wait_s",
    "base.hold_driver_in_unattended_upgrades", "base.disable_sleep", "base.protect_login",
    "base.earlyoom", "base.compaction_proactiveness", "cuda.version", "cuda.package",
    "cuda.repositories", "docker.packages", "docker.toolkit_packages", "docker.repositories",
    "docker.daemon", "disk.reserve_gib", "paths.docker_dir", "paths.cache_dir", "ssh.first_user",
    "ssh.config_file", "ssh.known_hosts_file", "sudo",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class UninstallSettings:
    """What `deploys/uninstall.py` takes along; usually given as --data uninstall.models=true."""

    models: bool = setting(False, "Remove downloaded and built models, too.")
    engine: bool = setting(
        False,
        "Remove Docker, the NVIDIA container toolkit and CUDA, too, where a deploy installed them "
        "and nobody else has containers.",
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """Keys of group_vars/*.yml and host_vars/*.yml. Defaults: group_vars/all.yml."""

    model: str = setting(
        "qwen3.5-122b",
        "Which model to serve: the stem of a file in catalog/models.",
        heading="What to serve\n"
        "What the engine, its proof and its watch are told is one frozen release: model, profile, "
        "engine, memory, watch, check, and names and time limits of serve. Changing any of it "
        "restarts the engine, proven, with a way back. Port, exposure, TLS, key and limits of "
        "requests restart nothing.",
        **CATALOG_NAME,
        examples=["qwen3.5-122b"],
    )
    profile: str = setting(
        "v2",
        "How to serve it: the stem of a file in catalog/profiles.",
        **CATALOG_NAME,
        examples=["v2", "v2-tq"],
    )
    keep_ready: tuple[PairSettings, ...] = setting(
        (),
        "Other model and profile pairs whose downloads, tree and image a host has ready, so that "
        "a change to one of them needs no download and no build.",
        uniqueItems=True,
        examples=[[{"model": "qwen3.5-122b", "profile": "base"}]],
    )
    schedule: tuple[ScheduledSettings, ...] = setting(
        (),
        "Times at which a host changes between pairs by itself, each change proven, with a way "
        "back. Every pair is the one above or stands in keep_ready, and the one above has a time "
        "as well. A deploy leaves a pair alone that was changed to in this way.",
        uniqueItems=True,
        examples=[
            [
                {"at": "08:00", "model": "qwen3.5-122b", "profile": "v2"},
                {"at": "20:00", "model": "qwen3.5-122b", "profile": "agent"},
            ]
        ],
    )
    services: dict[str, ServiceSettings] = setting(
        dict,
        "More services on this host, by name, such as an embedding model beside the main one. "
        "Each is rolled out, proven, watched and rolled back by itself; one that is not listed "
        "any more is stopped.",
        propertyNames=SERVICE_NAME,
        examples=[
            {
                "embed": {
                    "model": "qwen3-embedding",
                    "profile": "plain",
                    "port": 8001,
                    "memory_gib": 6,
                }
            }
        ],
    )
    releases: ReleaseSettings = section(ReleaseSettings)
    rollout: RolloutSettings = section(RolloutSettings)
    serve: ServeSettings = section(ServeSettings)
    engine: EngineSettings = section(EngineSettings)
    checkpoint: CheckpointSettings = section(CheckpointSettings)
    requantize: RequantizeSettings = section(RequantizeSettings)
    cluster: ClusterSettings = section(ClusterSettings)
    replicas: ReplicasSettings = section(ReplicasSettings)
    fabric: FabricSettings = section(FabricSettings)
    memory: MemorySettings = section(MemorySettings, heading="Memory: one pool for CPU and GPU")
    watch: WatchSettings = section(WatchSettings)
    check: CheckSettings = section(CheckSettings)
    lock_file: str = setting(
        "spark.lock.yml",
        "Path of the lock, relative to the folder that holds the inventory's group_vars. The lock "
        "turns names into commits and digests.",
        heading="Where things come from",
        **BELOW,
        examples=["spark.lock.yml"],
    )
    locked: Literal["first-use", "required"] = setting(
        "first-use",
        "first-use: a name that is not locked is locked when a run meets it; required: such a run "
        "is refused.",
    )
    images: dict[str, Annotated[str, about(**IMAGE)]] = setting(
        lambda: {
            "engine": "vllm/vllm-openai:v0.33.0",
            "gpu_check": "nvidia/cuda:13.0.2-base-ubuntu24.04",
        },
        "Container images by role; a tag is locked to its digest. `engine` and `gpu_check` (must "
        "print a GPU line; proves the runtime) are always needed; models may name further ones.",
        required=["engine", "gpu_check"],
        propertyNames=IMAGE_ROLE,
    )
    registries: RegistrySettings = section(RegistrySettings)
    hub: HubSettings = section(HubSettings)
    downloads: DownloadSettings = section(DownloadSettings)
    fleet: FleetSettings = section(FleetSettings)
    proxy: ProxySettings = section(ProxySettings)
    repositories: Annotated[dict[str, RepositorySettings], knowing_keys("name")] = setting(
        dict,
        "Signed apt repositories by name; cuda.repositories and docker.repositories choose among "
        "them.",
        propertyNames=REPOSITORY_NAME,
        examples=[
            {
                "vendor": {
                    "url": "https://example.org/ubuntu",
                    "suite": "./",
                    "components": [],
                    "key_url": "https://example.org/key.asc",
                    "key_sha256": "0" * 64,
                }
            }
        ],
    )
    expect: ExpectSettings = section(ExpectSettings, heading="What a host must be")
    reboot: Literal["report", "allow"] = setting(
        "report",
        "What becomes of a pending reboot (new kernel or driver): report tells it; allow has the "
        "deploy reboot such hosts, one after the other, each proven again before the next. A cause "
        "that stays is not tried twice.",
    )
    takeover: tuple[Annotated[str, about(**CONTAINER)], ...] = setting(
        (),
        "Containers of others (by name) that a run may stop and disable because they hold the GPU "
        "memory.",
        uniqueItems=True,
        examples=[["old-vllm"]],
    )
    allow_memory_holders: tuple[Text, ...] = setting(
        (),
        "Names of processes that may hold memory or the GPU next to the engine; preflight leaves "
        "them out.",
        uniqueItems=True,
        examples=[["gnome-shell"]],
    )
    allow_containers: dict[str, Annotated[Gib, about(minimum=0)]] = setting(
        dict,
        "Containers of others (by name) that serve models or hold the GPU and may stay, with the "
        "GiB each may take; the engine gets that much less, beside memory.reserve_gib.",
        examples=[{"comfyui": 12}],
    )
    override_rails: dict[str, Annotated[Text, about(minLength=8)]] = setting(
        dict,
        "Refusing guard rails that you take on for this host, by name, and why; the plan warns of "
        "each. Only rails with `may_be_overridden: true` in catalog/guard_rails.yml.",
        propertyNames=RAIL_NAME,
        examples=[{"trust-remote-code": "the parser in our image was reviewed in November"}],
    )
    base: BaseSettings = section(BaseSettings, heading="What a host gets")
    cuda: CudaSettings = section(CudaSettings)
    docker: DockerSettings = section(DockerSettings)
    disk: DiskSettings = section(DiskSettings)
    paths: PathSettings = section(PathSettings)
    uninstall: UninstallSettings = section(UninstallSettings)
    ssh: SshSettings = section(SshSettings, heading="How to reach a host")
    sudo: bool = setting(True, "The login user is not root.")

    @property
    def ranks(self) -> int:
        """Return on how many hosts, with a GPU each, the model is spread."""
        return max(1, len(self.cluster.hosts))

    @property
    def kept_bytes(self) -> int:
        """Return what the engine must leave: the reserve, what containers and services may take."""
        others = sum(service.memory_bytes for service in self.services.values())
        return self.memory.reserve_bytes + sum(self.allow_containers.values()) + others

    @property
    def ready_pairs(self) -> tuple[PairSettings, ...]:
        """Return the pairs to have ready, without the one that is served."""
        served = PairSettings(self.model, self.profile)
        return tuple(pair for pair in dict.fromkeys(self.keep_ready) if pair != served)

    def of_service(self, name: str) -> Settings:
        """Return these settings as they are for one of the services beside the main one."""
        one = self.services[name]
        return dataclasses.replace(
            self,
            model=one.model,
            profile=one.profile,
            keep_ready=(),
            services={},
            schedule=(),
            cluster=ClusterSettings(),
            replicas=ReplicasSettings(),
            serve=dataclasses.replace(self.serve, port=one.port, names=one.names),
            engine=EngineSettings(
                **{f.name: getattr(one.engine, f.name) for f in dataclasses.fields(one.engine)}
            ),
            # All but its own share is others'.
            allow_containers={},
            memory=dataclasses.replace(
                self.memory, reserve_bytes=self.memory.total_bytes - one.memory_bytes
            ),
        )

    @property
    def all_served(self) -> tuple[Settings, ...]:
        """Return these settings for each service and each pair to have ready; main comes first."""
        ready = (self.of_pair(pair) for pair in self.ready_pairs)
        return (self, *ready, *map(self.of_service, self.services))

    def of_pair(self, pair: PairSettings) -> Settings:
        """Return these settings as they would be with another pair to serve."""
        return dataclasses.replace(self, model=pair.model, profile=pair.profile)
