"""The plan of one host: settings, catalog, lock and payload joined. Pure: same in, same out."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from spark_contract.release import Release
from spark_contract.units import MAIN_SERVICE

from spark_deploy.config.catalog.model import Model, PlainModel
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.host import BaseSettings, ExpectSettings
from spark_deploy.config.settings.sources import RepositorySettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.types import Lock
from spark_deploy.plan.checkpoint import (
    checkpoint_plan,
    requantized_plan,
    served_source,
    source_plan,
)
from spark_deploy.plan.cluster import ways
from spark_deploy.plan.disk import disk_plan, done_once_there, image_peak_bytes, needed_by_path
from spark_deploy.plan.gateway import gateway_plan, named
from spark_deploy.plan.image import beside_plans, image_plan, locked_image
from spark_deploy.plan.machine import (
    NJS,
    BasePlan,
    CudaPlan,
    DockerPlan,
    NeedsPlan,
    PayloadIdentity,
    ToolsPlan,
)
from spark_deploy.plan.release import cache_dir, serve_plan
from spark_deploy.plan.resolve import Request, Resolved, resolve, resolve_service
from spark_deploy.plan.types import (
    DiskUse,
    HostPlan,
    PairPlan,
    ScheduledPlan,
    ServicePlan,
    SourcePlan,
)


def plan_host(request: Request) -> HostPlan:
    """Return everything there is to do on one host, or raise ``SparkError``."""
    request = replace(request, catalog=request.catalog.knowing(request.lock.anatomies))
    settings, lock = request.settings, request.lock
    served = resolve(settings, request.catalog)
    main = _service_plan(MAIN_SERVICE, served, request)
    services = tuple(
        _service_plan(name, resolve_service(settings, name, request.catalog), request)
        for name in settings.services
    )
    others = [resolve(settings.of_pair(other), request.catalog) for other in settings.ready_pairs]
    ready = tuple(pair_plan(other, request) for other in others)
    pairs = (main, *services, *ready)
    timed = {(one.model, one.profile) for one in settings.schedule}
    releases = {(main.model, main.profile): main.serve} | {
        (part.model, part.profile): _release(MAIN_SERVICE, one, part, request)
        for one, part in zip(others, ready, strict=True)
        if (part.model, part.profile) in timed
    }
    main = replace(
        main,
        gateway=named(main, services),
        schedule=tuple(
            ScheduledPlan(one.at, releases[one.model, one.profile]) for one in settings.schedule
        ),
    )
    docker = _docker(served.model, settings, lock)
    disk = disk_plan(settings.paths.docker_dir, pairs)
    return HostPlan(
        **_fields(main),
        host=request.host,
        paths=settings.paths,
        needs=replace(
            _needs(settings, (main, *services), disk, docker.check_image, pairs),
            cluster=settings.cluster.hosts,
            ways=ways(settings, request.host, request.fabric),
        ),
        base=base_plan(settings),
        cuda=_cuda(settings),
        docker=docker,
        tools=tools_plan(request.payload),
        disk=disk,
        ready=ready,
        services=services,
        releases_kept=settings.releases.keep,
        proxy=settings.proxy,
        fleet=settings.fleet,
    )


def base_plan(settings: Settings) -> BasePlan:
    """Return what every host of ours has, whatever it serves."""
    base = BasePlan(paths=settings.paths, **_fields(settings.base))
    # What chooses among several services runs inside nginx.
    return replace(base, packages=(*base.packages, NJS)) if settings.services else base


def tools_plan(payload: PayloadIdentity) -> ToolsPlan:
    """Return the tools that every host of ours has."""
    return ToolsPlan(payload.tools_digest, payload.python_requirements)


def _service_plan(name: str, served: Resolved, request: Request) -> ServicePlan:
    """Return one service of the host."""
    pair = pair_plan(served, request)
    return ServicePlan(
        **_fields(pair),
        memory=served.memory,
        serve=_release(name, served, pair, request),
        gateway=gateway_plan(served.settings, request.host, name),
        warnings=served.warnings,
    )


def _release(service: str, served: Resolved, pair: PairPlan, request: Request) -> Release:
    return serve_plan(
        service,
        served.model,
        served.profile,
        served.settings,
        pair.tree,
        pair.image,
        served.memory,
        pair.beside,
        request.fabric,
    )


def pair_plan(served: Resolved, request: Request) -> PairPlan:
    """Return what one model and profile need on the host."""
    model, profile, settings = served.model, served.profile, served.settings
    if isinstance(model, PlainModel) and model.anatomy is None:
        what = "its headers are not read yet, so nobody knows what it takes"
        fix = "run `spark-deploy update --missing` while the hub answers"
        raise PlanError.one(f"lock: {model.repository}", what, fix)
    lock, payload = request.lock, request.payload
    image = image_plan(model, profile, settings, lock, payload)
    cache = cache_dir(settings, profile, image)
    more = beside_plans(model, profile, settings, lock)
    made = requantized_plan(model, settings, lock, image, payload.quantiser_digest)
    checkpoint = checkpoint_plan(model, profile, settings, lock, made)
    if made:
        base = made.original
    elif checkpoint and isinstance(checkpoint.base, SourcePlan):
        base = checkpoint.base
    else:
        base = source_plan(served_source(model, lock), settings)
    sources = (base, *(one.source for one in more))
    return PairPlan(
        model.name, profile.name, sources, checkpoint, image, cache, beside=more, requantized=made
    )


def _needs(
    settings: Settings,
    services: tuple[ServicePlan, ...],
    disk: tuple[DiskUse, ...],
    check_image: str,
    pairs: tuple[PairPlan, ...],
) -> NeedsPlan:
    images = {pair.image.tag: image_peak_bytes(pair.image) for pair in pairs}
    sources = {
        source.dir: tuple((f.sha256, f.size_bytes) for f in source.locked.files if f.sha256)
        for pair in pairs
        for source in pair.sources
    }
    return NeedsPlan(
        **_fields(settings.expect),
        takeover=settings.takeover,
        allow_memory_holders=settings.allow_memory_holders,
        allow_containers=tuple(settings.allow_containers),
        ports=tuple(port for one in services for port in _ports_of(one)),
        gateways={one.serve.service: _ports_of(one) for one in services},
        disk_needed_bytes=needed_by_path(disk),
        disk_reserve_bytes=settings.disk.reserve_bytes,
        memory_needed_bytes=sum(one.memory.needed_bytes for one in services),
        # MemTotal of two equal machines differs by firmware settings.
        memory_total_min_bytes=round(settings.memory.total_bytes * 0.98),
        docker_dir=settings.paths.docker_dir,
        images=(check_image, *images),
        image_bytes=tuple(images.items()),
        disk_done_once_there=tuple(
            dict.fromkeys(done for pair in pairs for done in done_once_there(pair.checkpoint))
        ),
        reboot=settings.reboot,
        tailscale=settings.serve.expose == "tailscale",
        downloads=tuple(sources.items()),
        look_in=settings.downloads.look_in,
    )


def _cuda(settings: Settings) -> CudaPlan:
    cuda = settings.cuda
    return CudaPlan(
        cuda.version,
        cuda.package,
        _repositories(settings, cuda.repositories),
        settings.base.package_lock_wait_s,
    )


def _docker(model: Model, settings: Settings, lock: Lock) -> DockerPlan:
    docker = settings.docker
    daemon = dict(docker.daemon)
    if settings.registries.insecure:
        daemon["insecure-registries"] = sorted(
            {*daemon.get("insecure-registries", ()), *settings.registries.insecure}
        )
    return DockerPlan(
        packages=docker.packages,
        toolkit_packages=docker.toolkit_packages,
        repositories=_repositories(settings, docker.repositories),
        daemon=daemon,
        users=docker.users,
        allow_containers=tuple(settings.allow_containers),
        check_image=locked_image(model, settings, lock, "gpu_check").pinned,
        package_lock_wait_s=settings.base.package_lock_wait_s,
    )


def _repositories(settings: Settings, names: tuple[str, ...]) -> tuple[RepositorySettings, ...]:
    return tuple(settings.repositories[name] for name in names)


def _ports_of(service: ServicePlan) -> tuple[int, ...]:
    settings = service.gateway.settings
    return (settings.port, *([settings.replicas.port] if settings.replicas else ()))


def _fields(part: PairPlan | BaseSettings | ExpectSettings) -> dict[str, Any]:
    """Return a part as arguments for the plan that adds to it."""
    return {field.name: getattr(part, field.name) for field in fields(part)}
