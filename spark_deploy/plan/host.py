"""The plan of one host: settings, catalog, lock and payload joined. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from spark_contract.documents import plain
from spark_contract.release import Release
from spark_contract.units import MAIN_SERVICE

from spark_deploy.config.catalog.model import Model, PlainModel
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.host import BaseSettings, ExpectSettings
from spark_deploy.config.settings.sources import RepositorySettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.types import Lock
from spark_deploy.plan.artifacts import (
    beside_plans,
    checkpoint_plan,
    image_plan,
    locked_image,
    requantized_plan,
    served_source,
    source_plan,
)
from spark_deploy.plan.cluster import ways
from spark_deploy.plan.gateway import gateway_plan, named
from spark_deploy.plan.release import cache_dir, release_files_of, serve_plan
from spark_deploy.plan.resolve import Request, Resolved, resolve, resolve_service
from spark_deploy.plan.types import (
    NJS,
    BasePlan,
    CheckpointPlan,
    CudaPlan,
    DiskUse,
    DockerPlan,
    HostPlan,
    ImagePlan,
    NeedsPlan,
    PairPlan,
    PayloadIdentity,
    ScheduledPlan,
    ServicePlan,
    SourcePlan,
    ToolsPlan,
)

# Which of them share a filesystem, and what is free or there already, only the host knows:
# preflight and ``doctor`` compare (``spark_deploy/hosts/capacity.py``).


_GIB = 1024**3
# The engine image of 0.31.0: 11.0 GB compressed, 26.4 GB unpacked; a pull needs both.
_UNPACKED = 2.5
_CACHE_BYTES = 4 * _GIB  # of the release that serves and of the one before it


def disk_plan(docker_dir: str, pairs: Sequence[PairPlan]) -> tuple[DiskUse, ...]:
    """Return the use of every folder; image and cache are estimates, the rest is exact.

    Each path is the folder of one artefact, so that what lies there already can be subtracted.
    What pairs share counts once.

    Args:
        docker_dir: where the container engine keeps images.
        pairs: the one to serve, then those to have ready.
    """
    uses: dict[tuple[str, str], DiskUse] = {}
    for pair in pairs:
        for use in _of_pair(docker_dir, pair):
            uses.setdefault((use.path, use.what), use)
    return tuple(uses.values())


def _of_pair(docker_dir: str, pair: PairPlan) -> Iterator[DiskUse]:
    kept = pair.checkpoint is None or pair.checkpoint.keep_base
    beside = {one.source.dir for one in pair.beside}
    for source in pair.sources:
        size = source.size_bytes
        stays = kept or source.dir in beside
        yield DiskUse(source.dir, source.locked.repo, size, size if stays else 0)
    if pair.requantized:
        made = pair.requantized
        what = f"INT4 tree {made.order.name}"
        yield DiskUse(made.dir, what, made.order.work_bytes, made.size_bytes)
    if pair.checkpoint:
        size = pair.checkpoint.output_bytes
        yield DiskUse(pair.checkpoint.dir, f"checkpoint {pair.checkpoint.order.name}", size, size)
    after = image_after_bytes(pair.image)
    yield DiskUse(docker_dir, f"image {pair.image.tag}", image_peak_bytes(pair.image), after)
    yield DiskUse(pair.cache_dir, "compile cache", _CACHE_BYTES, _CACHE_BYTES)


def image_after_bytes(image: ImagePlan) -> int:
    """Return what an image takes once it is unpacked."""
    return round(image.size_bytes * _UNPACKED)


def image_peak_bytes(image: ImagePlan) -> int:
    """Return what an image takes while it arrives."""
    return image.size_bytes + image_after_bytes(image)


def disk_total(uses: Sequence[DiskUse]) -> tuple[int, int]:
    """Return what a bare host with one filesystem needs at most on the way, and what it keeps."""
    return sum(use.peak_bytes for use in uses), sum(use.after_bytes for use in uses)


def done_once_there(checkpoint: CheckpointPlan | None) -> tuple[tuple[str, str], ...]:
    """Return (path, tree) pairs: with the tree in place, the path takes no more bytes.

    A tree appears by one rename, so it is whole when it is there, also when it is smaller than
    planned (names that the base holds twice come out once); a base not kept is not fetched again.
    """
    if checkpoint is None or checkpoint.order.layout != "full":
        return ()
    beside = () if checkpoint.keep_base else ((checkpoint.base.dir, checkpoint.dir),)
    return ((checkpoint.dir, checkpoint.dir), *beside)


def needed_by_path(uses: Sequence[DiskUse]) -> tuple[tuple[str, int], ...]:
    """Return the peak of every folder, for preflight."""
    total: dict[str, int] = {}
    for use in uses:
        total[use.path] = total.get(use.path, 0) + use.peak_bytes
    return tuple(sorted(total.items()))


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


def document(plan: HostPlan) -> dict[str, Any]:
    """Return the whole plan of a host as plain data, with what follows from its parts."""
    drop_in = release_files_of(plan)[-1]
    peak_bytes, after_bytes = disk_total(plan.disk)
    return {
        **plain(plan),
        "disk_total": {"peak_bytes": peak_bytes, "after_bytes": after_bytes},
        "unit": {
            "name": plan.serve.serve_unit,
            "drop_in": drop_in.path,
            "lines": drop_in.content.decode().splitlines(),
        },
    }
