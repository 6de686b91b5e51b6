"""Compute the plan of a host from settings, catalog, lock and payload."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from spark_contract.documents import to_plain
from spark_contract.units import MAIN_SERVICE

from spark_deploy.config.catalog.model import Model, PlainModel
from spark_deploy.config.documents import GIB
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.host import (
    BASE_PACKAGES,
    CUDA_PACKAGE,
    CUDA_TOOLKIT,
    DOCKER_DIR,
    TOOLKIT_PACKAGES,
)
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.types import Lock
from spark_deploy.plan import artifacts, cluster, gateway, release, types
from spark_deploy.plan.resolve import Request, Resolved, resolve, resolve_service
from spark_deploy.plan.types import DiskUse, HostPlan, ImagePlan, ModelPlan, ServicePlan
from spark_deploy.plan.vocabulary import vocabulary_plan

# The engine image of 0.31.0: 11.0 GB compressed, 26.4 GB unpacked; a pull needs both.
_UNPACKED = 2.5
_CACHE_BYTES = 4 * GIB  # compile caches of the current and the previous release


def plan_host(request: Request) -> HostPlan:
    settings, lock = request.settings, request.lock
    request = replace(request, catalog=request.catalog.with_repo_metadata(lock.repo_metadata))
    resolved = resolve(settings, request.catalog)
    main = _service_plan(MAIN_SERVICE, resolved, request)
    services = tuple(
        _service_plan(name, resolve_service(settings, name, request.catalog), request)
        for name in settings.services
    )
    resolved_ready = [
        resolve(settings.with_model(entry), request.catalog) for entry in settings.ready_models
    ]
    ready = tuple(plan_model(other, request) for other in resolved_ready)
    models = (main, *services, *ready)
    scheduled = {(change.model, change.profile) for change in settings.schedule}
    releases = {(main.model, main.profile): main.release} | {
        (plan.model, plan.profile): release.plan_release(MAIN_SERVICE, other, plan, request.fabric)
        for other, plan in zip(resolved_ready, ready, strict=True)
        if (plan.model, plan.profile) in scheduled
    }
    main = replace(
        main,
        gateway=gateway.route_by_name(main, services),
        schedule=tuple(
            types.ScheduledPlan(change.at, releases[change.model, change.profile])
            for change in settings.schedule
        ),
    )
    docker = _docker(resolved.model, settings, lock)
    disk = _disk_uses(models)
    return HostPlan(
        **_field_values(main),
        host=request.host,
        paths=settings.paths,
        preflight=_preflight_plan(request, (main, *services), disk, docker.check_image, models),
        base=base_plan(settings),
        cuda=types.CudaPlan(
            CUDA_TOOLKIT,
            CUDA_PACKAGE,
            tuple(settings.repositories.values()),
            settings.base.package_lock_wait_s,
        ),
        docker=docker,
        payload=request.payload,
        disk=disk,
        ready=ready,
        services=services,
        releases_kept=settings.releases.keep,
        proxy=settings.proxy,
        fleet=settings.fleet,
    )


def base_plan(settings: Settings) -> types.BasePlan:
    # nginx's JavaScript module chooses among several services, and computes digests of keys.
    needs_module = settings.services or settings.serve.keys
    packages = (*BASE_PACKAGES, *([types.NJS] if needs_module else ()))
    return types.BasePlan(settings=settings.base, packages=packages, paths=settings.paths)


def _service_plan(name: str, resolved: Resolved, request: Request) -> ServicePlan:
    model = plan_model(resolved, request)
    # The main gateway starts every on-request service, any other gateway only its own.
    idle_stop_s = {
        service: entry.idle_stop_s
        for service, entry in request.settings.services.items()
        if entry.start == "on-request" and name in (MAIN_SERVICE, service)
    }
    return ServicePlan(
        **_field_values(model),
        memory=resolved.memory,
        release=release.plan_release(name, resolved, model, request.fabric),
        gateway=gateway.gateway_plan(resolved.settings, request.host, name, idle_stop_s),
        warnings=resolved.warnings,
    )


def plan_model(resolved: Resolved, request: Request) -> ModelPlan:
    model, profile, settings = resolved.model, resolved.profile, resolved.settings
    if isinstance(model, PlainModel) and model.metadata is None:
        message = "the size is unknown, because the headers have not been read yet"
        fix = "run `spark-deploy update --missing` with access to the hub"
        raise PlanError.single(f"lock: {model.repository}", message, fix)
    lock, payload = request.lock, request.payload
    image = artifacts.image_plan(model, profile, settings, lock, payload)
    companions = artifacts.companion_plans(model, profile, settings, lock)
    requantized = artifacts.requantized_plan(model, settings, lock, image, payload.quantizer_digest)
    checkpoint = artifacts.checkpoint_plan(model, profile, settings, lock, requantized)
    if requantized:
        base = requantized.original
    elif checkpoint and isinstance(checkpoint.base, types.SourcePlan):
        base = checkpoint.base
    else:
        base = artifacts.source_plan(artifacts.served_source(model, lock), settings)
    plan = ModelPlan(
        model.name,
        profile.name,
        (base, *(companion.source for companion in companions)),
        checkpoint,
        image,
        release.cache_dir(settings, profile, image),
        companions=companions,
        requantized=requantized,
    )
    checkpoint_dir = plan.served_checkpoint.dir
    vocabulary = vocabulary_plan(model, profile, settings, base.locked, checkpoint_dir)
    return replace(plan, vocabulary=vocabulary)


def _preflight_plan(
    request: Request,
    services: tuple[ServicePlan, ...],
    disk: tuple[DiskUse, ...],
    check_image: str,
    models: tuple[ModelPlan, ...],
) -> types.PreflightPlan:
    settings = request.settings
    images = {model.image.tag: _image_peak_bytes(model.image) for model in models}
    gateways = {service.release.service: _gateway_ports(service) for service in services}
    sources = {
        source.dir: tuple((f.sha256, f.size_bytes) for f in source.locked.files if f.sha256)
        for model in models
        for source in model.sources
    }
    peaks: Counter[str] = Counter()
    for use in disk:
        peaks[use.path] += use.peak_bytes
    built = (path for model in models for path in _paths_needing_no_space(model.checkpoint))
    return types.PreflightPlan(
        expect=settings.expect,
        takeover=settings.takeover,
        allow_memory_holders=settings.allow_memory_holders,
        allow_containers=tuple(settings.allow_containers),
        ports=tuple(port for ports in gateways.values() for port in ports),
        gateways=gateways,
        disk_needed_bytes=tuple(sorted(peaks.items())),
        disk_reserve_bytes=settings.disk.reserve_bytes,
        memory_needed_bytes=_memory_needed_bytes(services),
        # Firmware settings change MemTotal of otherwise equal machines.
        memory_total_min_bytes=round(settings.memory.total_bytes * 0.98),
        images=(check_image, *images),
        image_bytes=tuple(images.items()),
        skip_disk_if_present=tuple(dict.fromkeys(built)),
        reboot=settings.reboot,
        tailscale=settings.serve.expose == "tailscale",
        downloads=tuple(sources.items()),
        look_in=settings.downloads.look_in,
        cluster=settings.cluster.hosts,
        links=cluster.member_links(settings, request.host, request.fabric),
    )


def _memory_needed_bytes(services: Sequence[ServicePlan]) -> int:
    """Return the memory of all services; of those started on request, only the largest counts."""
    always, on_request = [0], [0]
    for service in services:
        is_on_request = service.release.service in (service.gateway.settings.on_request or {})
        (on_request if is_on_request else always).append(service.memory.needed_bytes)
    return sum(always) + max(on_request)


def _docker(model: Model, settings: Settings, lock: Lock) -> types.DockerPlan:
    docker = settings.docker
    daemon = dict(docker.daemon)
    if settings.registries.insecure:
        daemon["insecure-registries"] = sorted(
            {*daemon.get("insecure-registries", ()), *settings.registries.insecure}
        )
    return types.DockerPlan(
        packages=docker.packages,
        toolkit_packages=TOOLKIT_PACKAGES,
        repositories=tuple(settings.repositories.values()),
        daemon=daemon,
        users=docker.users,
        allow_containers=tuple(settings.allow_containers),
        check_image=artifacts.locked_image(model, settings, lock, "gpu_check").pinned,
        package_lock_wait_s=settings.base.package_lock_wait_s,
    )


def _gateway_ports(service: ServicePlan) -> tuple[int, ...]:
    access = service.gateway.settings
    return (access.port, access.replicas.port) if access.replicas else (access.port,)


def _field_values(plan: ModelPlan) -> dict[str, Any]:
    return {field.name: getattr(plan, field.name) for field in fields(plan)}


def _disk_uses(models: Sequence[ModelPlan]) -> tuple[DiskUse, ...]:
    """Return the disk use of every folder. Image and cache are estimates, the rest is exact.

    Each path is the folder of an artifact, so that existing files can be subtracted. Shared
    artifacts count only once.
    """
    uses: dict[tuple[str, str], DiskUse] = {}
    for model in models:
        for use in _model_disk_uses(model):
            uses.setdefault((use.path, use.label), use)
    return tuple(uses.values())


def _model_disk_uses(model: ModelPlan) -> Iterator[DiskUse]:
    keeps_base = model.checkpoint is None or model.checkpoint.keep_base
    companions = {companion.source.dir for companion in model.companions}
    for source in model.sources:
        size = source.size_bytes
        stays = keeps_base or source.dir in companions
        yield DiskUse(source.dir, source.locked.repo, size, size if stays else 0)
    if requantized := model.requantized:
        label = f"INT4 tree {requantized.build.name}"
        yield DiskUse(requantized.dir, label, requantized.build.work_bytes, requantized.size_bytes)
    if tree := model.checkpoint:
        size = tree.output_bytes
        yield DiskUse(tree.dir, f"checkpoint {tree.build.name}", size, size)
    peak, after = _image_peak_bytes(model.image), image_after_bytes(model.image)
    yield DiskUse(DOCKER_DIR, f"image {model.image.tag}", peak, after)
    yield DiskUse(model.cache_dir, "compile cache", _CACHE_BYTES, _CACHE_BYTES)


def image_after_bytes(image: ImagePlan) -> int:
    return round(image.size_bytes * _UNPACKED)


def _image_peak_bytes(image: ImagePlan) -> int:
    return image.size_bytes + image_after_bytes(image)


def disk_total(uses: Sequence[DiskUse]) -> tuple[int, int]:
    return sum(use.peak_bytes for use in uses), sum(use.after_bytes for use in uses)


def _paths_needing_no_space(checkpoint: types.CheckpointPlan | None) -> tuple[tuple[str, str], ...]:
    """Return (path, checkpoint) tuples: if the checkpoint exists, the path needs no more space.

    The builder renames only finished checkpoints to this path, so an existing one is complete, even
    if it is smaller than planned (repeated names are written once).
    """
    if checkpoint is None or checkpoint.build.layout != "full":
        return ()
    base = () if checkpoint.keep_base else ((checkpoint.base.dir, checkpoint.dir),)
    return ((checkpoint.dir, checkpoint.dir), *base)


def plan_document(plan: HostPlan) -> dict[str, Any]:
    """Return a host's plan as plain data, with disk totals and the unit's limits."""
    drop_in = release.release_files(plan)[-1]  # 50-release.conf
    peak_bytes, after_bytes = disk_total(plan.disk)
    document = to_plain(plan)
    for model in (document, *document["ready"], *document["services"]):
        texts = {"vocabulary": "text", "requantized": "calibration"}
        for part, text in texts.items():  # of local files, up to 64 MiB
            (model[part] or {}).pop(text, None)
        (model["checkpoint"] or {}).get("base", {}).pop("calibration", None)
    return {
        **document,
        "disk_total": {"peak_bytes": peak_bytes, "after_bytes": after_bytes},
        "unit": {
            "name": plan.release.serve_unit,
            "drop_in": drop_in.path,
            "lines": drop_in.content.decode().splitlines(),
        },
    }
