"""What of Docker's is ours, and what other people run in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.keep import Before, Footprint, Thing
from spark_contract.paths import Paths
from spark_contract.records import GpuProof

from spark_host.prune import holdings
from spark_host.system import docker


@dataclass(frozen=True, slots=True)
class Others:
    """What other people run in Docker."""

    containers: tuple[str, ...]
    with_gpu: tuple[str, ...]
    images: frozenset[str]  # ids

    def in_the_way(self, wanted: Footprint) -> dict[str, str]:
        """Say of each package that containers of others need why it has to stay."""
        kept = [(wanted.engine_packages, self.containers), (wanted.gpu_packages, self.with_gpu)]
        return {
            package: f"containers of others are there: {', '.join(names)}"
            for packages_of, names in kept
            for package in packages_of
            if names
        }


def of_others() -> Others:
    """Ask Docker what it runs that is not ours."""
    if docker.client("version").returncode == 127:
        return Others((), (), frozenset())
    if not docker.is_up():
        fix = "systemctl start docker, then run again"
        raise HostToolError("docker", "does not answer, so nobody knows what is in it", fix)
    mine = set(docker.engine_containers())
    names, gpu, images = [], [], set()
    for item in docker.query("/containers/json?all=1") or []:
        name = str((item.get("Names") or [item.get("Id")])[0]).lstrip("/")
        if name in mine:
            continue
        names.append(name)
        images.add(str(item.get("ImageID")))
        detail: dict[str, Any] = (docker.container(name, 60) or {}).get("HostConfig") or {}
        if detail.get("Runtime") == "nvidia" or detail.get("DeviceRequests"):
            gpu.append(name)
    return Others(tuple(sorted(names)), tuple(sorted(gpu)), frozenset(images))


def images(before: Before | None, others: Others, paths: Paths) -> Iterator[Thing]:
    """List the images of ours, the one with the most layers first."""
    found = holdings.images(holdings.known_jobs(paths), paths)
    found += _check_image({image.reference for image in found}, paths)
    sizes = holdings.image_bytes(found, [])
    for image in sorted(found, key=lambda one: -len(one.layers)):
        identity = str((docker.image(image.reference) or {}).get("Id"))
        if before is not None and identity in before.images:
            continue
        stays = "a container of others uses it" if identity in others.images else ""
        yield Thing("image", image.reference, sizes[image.reference], stays)


def _check_image(known: set[str], paths: Paths) -> Iterator[holdings.Image]:
    """Yield the image that proved the GPU, unless somebody gave it a name since."""
    try:
        reference = files.load(GpuProof, paths.gpu_receipt, "no container saw the GPU").key["image"]
    except (HostToolError, KeyError):
        return
    image = docker.image(reference) if reference and reference not in known else None
    if image is not None and not image.get("RepoTags"):
        layers = tuple((image.get("RootFS") or {}).get("Layers") or ())
        yield holdings.Image(reference, int(image.get("Size") or 0), layers)
