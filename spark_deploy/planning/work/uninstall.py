"""What leaving a host is about: everything that its settings would make there."""

from __future__ import annotations

from spark_contract.work.keep import Footprint

from spark_deploy.planning.machine import NJS
from spark_deploy.settings.types import Settings

DAEMON_JSON = "/etc/docker/daemon.json"


def wanted_of(
    settings: Settings,
    *,
    files: tuple[str, ...],
    shared_files: tuple[str, ...],
    masked: tuple[str, ...],
    access_files: tuple[str, ...],
) -> Footprint:
    """Return what ``spark-host manifest`` and ``uninstall`` read.

    Args:
        settings: of the host.
        files: files of host care, ours alone.
        shared_files: files that a deploy may change and somebody else may have made.
        masked: units that a deploy masks.
        access_files: how this project logs in.
    """
    docker = settings.docker
    return Footprint(
        models_dir=settings.paths.models_dir,
        sources_dir=settings.paths.sources_dir,
        cache_dir=settings.paths.cache_dir,
        files=files,
        shared_files=(DAEMON_JSON, *shared_files),
        daemon_json=DAEMON_JSON,
        daemon_keys=tuple(sorted({*docker.daemon, "runtimes", "insecure-registries"})),
        masked=masked,
        packages=(*settings.base.packages, "earlyoom", NJS),
        engine_packages=docker.packages,
        gpu_packages=(*docker.toolkit_packages, settings.cuda.package),
        docker_users=docker.users,
        access_files=access_files,
        models=settings.uninstall.models,
        engine=settings.uninstall.engine,
    )
