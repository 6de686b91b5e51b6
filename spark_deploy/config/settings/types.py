"""All settings of a host, in the order of ``group_vars/all.yml``.

Type, default, limits and description of a setting are declared only once; ``violations`` checks
rules between settings. ``make docs`` generates schema, reference page and ``all.yml``.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from spark_contract.gateway import EXPOSURES
from spark_contract.units import MAIN_SERVICE

from spark_deploy.config.documents import (
    CLOSED,
    GIB,
    UNIQUE,
    KeyPath,
    Text,
    Violation,
    key_as_field,
    rule_validator,
)
from spark_deploy.config.schema_errors import suggest
from spark_deploy.config.settings.engine import EngineSettings
from spark_deploy.config.settings.host import (
    BaseSettings,
    ClusterSettings,
    DiskSettings,
    DockerSettings,
    ExpectSettings,
    FabricSettings,
    PathSettings,
    ReplicasSettings,
    SshSettings,
)
from spark_deploy.config.settings.patterns import (
    IMAGE_ROLE,
    RAIL_NAME,
    ContainerName,
    ImageName,
    RelativePath,
)
from spark_deploy.config.settings.service import (
    SERVICE_NAME,
    CatalogName,
    CheckpointSettings,
    CheckSettings,
    MemorySettings,
    ModelAndProfile,
    ReleaseSettings,
    RequantizeSettings,
    RolloutSettings,
    ScheduledSettings,
    ServeSettings,
    ServiceSettings,
    WatchSettings,
)
from spark_deploy.config.settings.sources import (
    REPOSITORY_NAME,
    DownloadSettings,
    FleetSettings,
    HubSettings,
    ProxySettings,
    RegistrySettings,
    RepositorySettings,
)

# Options of a single command, passed as `--data`.
COMMAND_FLAGS = frozenset({
    "releases.rollback_to", "releases.keep", "ssh.first_user", "fabric.measure",
    "fabric.restore", "uninstall.models", "uninstall.engine", "requantize.iters",
    "requantize.nsamples", "requantize.seqlen", "requantize.batch", "requantize.calibration",
})  # fmt: skip
# Settings that few users change.
EXPERT = frozenset({
    "locked", "lock_file", "registries.insecure", "override_rails", "allow_memory_holders",
    "rollout.canary", "serve.max_body_mib", "serve.max_requests_per_s", "serve.start_timeout_s",
    "serve.drain_s", "serve.tls_certificate", "serve.tls_key", "serve.ca_dir", "serve.tls_names",
    "engine.options", "engine.environment", "engine.memory_fraction", "engine.chat_template",
    "engine.template_fixes",
    "engine.draft_vocabulary_text", "engine.head", "checkpoint.layout", "checkpoint.keep_base",
    "cluster.subnet", "replicas.port", "fabric.networks", "fabric.interfaces", "fabric.mtu",
    "memory.total_gib", "memory.start_wait_s", "watch.stall_s",
    "check.timeout_s", "check.bench_s", "downloads.outage_s", "downloads.look_in",
    "fleet.address", "repositories", "expect.arch", "expect.gpu_name", "expect.os",
    "expect.dgx_os", "base.package_lock_wait_s", "base.skip", "base.earlyoom",
    "base.compaction_proactiveness", "docker.packages", "docker.daemon", "disk.reserve_gib",
    "ssh.known_hosts_file", "expect.unit_overrides",
})  # fmt: skip


@dataclass(frozen=True, slots=True, config=CLOSED)
class UninstallSettings:
    """Optional parts of `deploys/uninstall.py`; usually --data uninstall.models=true."""

    models: bool = Field(default=False, description="Remove downloaded and built models.")
    engine: bool = False
    """Remove Docker, the NVIDIA container toolkit and CUDA if a deploy installed them and no
    unmanaged containers exist."""


@dataclass(frozen=True, slots=True, config=CLOSED)
class Settings:
    """Keys of group_vars/*.yml and host_vars/*.yml. Defaults: group_vars/all.yml."""

    model: CatalogName = Field(default="qwen3.5-122b", examples=["qwen3.5-122b"])
    """Model to serve: a file name in catalog/models without .yml."""
    profile: CatalogName = Field(default="v2", examples=["v2", "v2-tq"])
    """Profile for the model: a file name in catalog/profiles without .yml."""
    keep_ready: tuple[ModelAndProfile, ...] = Field(
        default=(),
        examples=[[{"model": "qwen3.5-122b", "profile": "base"}]],
        json_schema_extra=UNIQUE,
    )
    """More models to download and build in advance, for fast switches."""
    schedule: tuple[ScheduledSettings, ...] = Field(
        default=(),
        examples=[[{"at": "08:00", "model": "qwen3.5-122b", "profile": "v2"},
                   {"at": "20:00", "model": "qwen3.5-122b", "profile": "agent"}]],
        json_schema_extra=UNIQUE,
    )  # fmt: skip
    """Times at which a host switches to a model and profile. Each entry's model and profile
    must be the host's default or listed in keep_ready, and the schedule needs an entry for the
    default too. A deploy does not undo a scheduled switch."""
    services: dict[str, ServiceSettings] = Field(
        default_factory=dict,
        examples=[{"embed": {"model": "qwen3-embedding", "profile": "plain", "port": 8001,
                             "memory_gib": 6}}],
        json_schema_extra={"propertyNames": SERVICE_NAME},
    )  # fmt: skip
    """More services on this host, by name, such as an embedding model. Each service is changed,
    checked and rolled back separately."""
    releases: ReleaseSettings = Field(default_factory=ReleaseSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    serve: ServeSettings = Field(default_factory=ServeSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    requantize: RequantizeSettings = Field(default_factory=RequantizeSettings)
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)
    replicas: ReplicasSettings = Field(default_factory=ReplicasSettings)
    fabric: FabricSettings = Field(default_factory=FabricSettings)
    memory: MemorySettings = Field(default_factory=MemorySettings)
    watch: WatchSettings = Field(default_factory=WatchSettings)
    check: CheckSettings = Field(default_factory=CheckSettings)
    lock_file: RelativePath = Field(default="spark.lock.yml", examples=["spark.lock.yml"])
    """Path of the lock file, relative to the parent folder of group_vars. The file pins names to
    commits and digests."""
    locked: Literal["first-use", "required"] = "first-use"
    """first-use: a run locks new names. required: a run rejects names that are not locked."""
    images: dict[str, ImageName] = Field(
        default_factory=lambda: {
            "engine": "vllm/vllm-openai:v0.33.0",
            "gpu_check": "nvidia/cuda:13.0.2-base-ubuntu24.04",
        },
        json_schema_extra={"required": ["engine", "gpu_check"], "propertyNames": IMAGE_ROLE},
    )
    """Container images by role; the lock file pins their digests. `engine` and `gpu_check` (which
    tests GPU access) are required; models may need more."""
    registries: RegistrySettings = Field(default_factory=RegistrySettings)
    hub: HubSettings = Field(default_factory=HubSettings)
    downloads: DownloadSettings = Field(default_factory=DownloadSettings)
    fleet: FleetSettings = Field(default_factory=FleetSettings)
    proxy: ProxySettings = Field(default_factory=ProxySettings)
    repositories: Annotated[dict[str, RepositorySettings], key_as_field("name")] = Field(
        default_factory=dict,
        examples=[{"vendor": {
            "url": "https://example.org/ubuntu", "suite": "./", "components": [],
            "key_url": "https://example.org/key.asc", "key_sha256": "0" * 64,
        }}],
        json_schema_extra={"propertyNames": REPOSITORY_NAME},
    )  # fmt: skip
    """Signed apt repositories by name, added before CUDA or Docker is installed."""
    expect: ExpectSettings = Field(default_factory=ExpectSettings)
    reboot: Literal["report", "allow"] = "report"
    """Action for a pending reboot (new kernel or driver). report: only print it. allow: reboot
    hosts in sequence, at most once for each cause, and check each host."""
    takeover: tuple[ContainerName, ...] = Field(
        default=(), examples=[["old-vllm"]], json_schema_extra=UNIQUE
    )
    """Unmanaged containers (by name) that a run may stop and disable because they use GPU
    memory."""
    allow_memory_holders: tuple[Text, ...] = Field(
        default=(), examples=[["gnome-shell"]], json_schema_extra=UNIQUE
    )
    """Process names that may use memory or the GPU next to the engine."""
    allow_containers: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, examples=[{"comfyui": 12}]
    )
    """Unmanaged containers allowed to use the GPU, by name, with the memory (GiB) reserved for
    each."""
    override_rails: dict[str, Annotated[str, Field(min_length=8)]] = Field(
        default_factory=dict,
        examples=[{"trust-remote-code": "the parser in our image was reviewed in November"}],
        json_schema_extra={"propertyNames": RAIL_NAME},
    )
    """Guard rails to override on this host, by name, with a reason; the plan warns. Only rails with
    `may_be_overridden: true` in catalog/guard_rails.yml."""
    base: BaseSettings = Field(default_factory=BaseSettings)
    docker: DockerSettings = Field(default_factory=DockerSettings)
    disk: DiskSettings = Field(default_factory=DiskSettings)
    paths: PathSettings = Field(default_factory=PathSettings)
    uninstall: UninstallSettings = Field(default_factory=UninstallSettings)
    ssh: SshSettings = Field(default_factory=SshSettings)

    @property
    def ranks(self) -> int:
        return max(1, len(self.cluster.hosts))

    @property
    def reserved_bytes(self) -> int:
        """Memory that the engine must leave to the system, containers and services."""
        containers_gib = sum(self.allow_containers.values())
        sizes_bytes: dict[str, list[int]] = {"always": [], "on-request": []}
        for service in self.services.values():
            sizes_bytes[service.start].append(service.memory_bytes)
        # On-request services share memory, so only the largest counts.
        services_bytes = sum(sizes_bytes["always"]) + max(sizes_bytes["on-request"], default=0)
        return self.memory.reserve_bytes + round(containers_gib * GIB) + services_bytes

    @property
    def ready_models(self) -> tuple[ModelAndProfile, ...]:
        served = ModelAndProfile(self.model, self.profile)
        return tuple(ready for ready in dict.fromkeys(self.keep_ready) if ready != served)

    def service_settings(self, name: str) -> "Settings":
        """Return the settings as if service ``name`` were the only one on the host."""
        service = self.services[name]
        fields = [field.name for field in dataclasses.fields(service.engine)]
        reserve_gib = self.memory.total_gib - service.memory_gib
        return dataclasses.replace(
            self, model=service.model, profile=service.profile, keep_ready=(), services={},
            schedule=(), cluster=ClusterSettings(), replicas=ReplicasSettings(),
            serve=dataclasses.replace(
                self.serve, port=service.port, names=service.names, defaults={}
            ),
            engine=EngineSettings(**{field: getattr(service.engine, field) for field in fields}),
            # Reserve all memory except the service's.
            allow_containers={}, memory=dataclasses.replace(self.memory, reserve_gib=reserve_gib),
        )  # fmt: skip

    @property
    def all_models(self) -> tuple["Settings", ...]:
        ready = (self.with_model(selection) for selection in self.ready_models)
        return (self, *ready, *map(self.service_settings, self.services))

    def with_model(self, selection: ModelAndProfile) -> "Settings":
        return dataclasses.replace(self, model=selection.model, profile=selection.profile)


def _unknown_names(
    settings: Settings, catalog: Callable[[str], Collection[str]]
) -> Iterator[Violation]:
    """Yield unknown models and profiles; ``catalog`` returns the names of a kind."""
    selections: list[tuple[KeyPath, Settings | ModelAndProfile | ServiceSettings]] = [
        ((), settings)
    ]
    selections += [
        (("keep_ready", index), ready) for index, ready in enumerate(settings.keep_ready)
    ]
    selections += [(("services", name), service) for name, service in settings.services.items()]
    for path, selection in selections:
        for key in ("model", "profile"):
            name, names = getattr(selection, key), catalog(f"{key}s")
            if name not in names:
                known = [other for other in names if not other.startswith("lab-")]
                message = f"unknown {key} '{name}' (known: {', '.join(known)})"
                fix = f"choose a known name, or add catalog/{key}s/{name}.yml"
                fix = suggest(name, known, fix)
                yield Violation((*path, key), message, fix)


def settings_violations(
    settings: Settings, catalog: Callable[[str], Collection[str]] | None = None
) -> Iterator[Violation]:
    """Yield all broken rules, and unknown models and profiles if there is a catalog."""
    if catalog:
        yield from _unknown_names(settings, catalog)
    yield from _schedule_violations(settings)
    yield from _service_violations(settings)
    yield from _replica_violations(settings)
    yield from _section_violations(settings)


def _schedule_violations(settings: Settings) -> Iterator[Violation]:
    served = ModelAndProfile(settings.model, settings.profile)
    scheduled = [ModelAndProfile(entry.model, entry.profile) for entry in settings.schedule]
    for index, entry in enumerate(scheduled):
        if entry not in (served, *settings.keep_ready):
            message = f"{entry.model} with {entry.profile} is not in keep_ready"
            fix = f"add keep_ready: [{{model: {entry.model}, profile: {entry.profile}}}]"
            yield Violation(("schedule", index), message, fix)
    if scheduled and settings.ranks > 1:
        message = "cluster members switch together, but a timer switches a single host"
        yield Violation(("schedule",), message, "remove the schedule or the cluster")
    if scheduled and served not in scheduled:
        message = f"no entry switches back to {served.model} with {served.profile}"
        fix = "add an entry for this pair, or set model and profile to those of an entry"
        yield Violation(("schedule",), message, fix)


def _replica_violations(settings: Settings) -> Iterator[Violation]:
    replicas = settings.replicas
    if not replicas.hosts:
        return
    if settings.cluster.hosts:
        message = "a host cannot be both a cluster member and a replica"
        fix = "remove the host from cluster.hosts or replicas.hosts"
        yield Violation(("replicas", "hosts"), message, fix)
    if EXPOSURES[settings.serve.expose].audience is None or settings.serve.expose == "docker":
        message = f"replicas cannot reach each other with expose: {settings.serve.expose}"
        yield Violation(("serve", "expose"), message, "set serve.expose to tailscale or lan")
    if settings.serve.tls != "off":
        message = "replicas connect to each other without TLS"
        fix = "set serve.tls to off, and serve.expose to tailscale, which encrypts traffic"
        yield Violation(("serve", "tls"), message, fix)
    if settings.serve.api_key.kind == "generate":
        message = "each host would generate a different key"
        fix = "set a common key: {env: NAME}, {file: PATH} or {command: [PROGRAM]}"
        yield Violation(("serve", "api_key"), message, fix)
    if settings.rollout.at_once == "all" or settings.rollout.at_once >= len(replicas.hosts):
        message = "all replicas would be unavailable at the same time"
        yield Violation(
            ("rollout", "at_once"), message, f"set it to {len(replicas.hosts) - 1} or less"
        )


def _service_violations(settings: Settings) -> Iterator[Violation]:
    owner_of_port = {settings.serve.port: "serve.port"}
    service_of_path: dict[str, str] = {}
    if settings.replicas.hosts:
        if settings.replicas.port == settings.serve.port:
            message = f"{settings.replicas.port} is also serve.port"
            yield Violation(("replicas", "port"), message, "set replicas.port to another port")
        owner_of_port.setdefault(settings.replicas.port, "replicas.port")
    for name, service in settings.services.items():
        where = ("services", name)
        if name == MAIN_SERVICE:
            fix = "choose another name; the top-level model and profile are for the main service"
            yield Violation(where, "this name is reserved for the main service", fix)
        for path in service.paths:
            first = service_of_path.setdefault(path, name)
            if first != name:
                message = f"{path} is already served by services.{first}"
                yield Violation((*where, "paths"), message, "list the path under one service only")
        owner = owner_of_port.setdefault(service.port, f"services.{name}.port")
        if owner != f"services.{name}.port":
            message = f"port {service.port} is already set in {owner}"
            yield Violation((*where, "port"), message, "set a different port for each service")
        for violation in service.violations(settings.memory.total_gib):
            yield violation._replace(key=(*where, *violation.key))


def _section_violations(settings: Settings) -> Iterator[Violation]:
    for field in dataclasses.fields(settings):
        section = getattr(settings, field.name)
        if hasattr(section, "violations"):
            for violation in section.violations():
                set_by = violation.set_by and (field.name, *violation.set_by)
                yield violation._replace(key=(field.name, *violation.key), set_by=set_by)


CheckedSettings = Annotated[Settings, rule_validator(settings_violations)]
