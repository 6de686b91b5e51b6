"""Fetch the model's repositories, each file checked against the lock; remove a base not kept."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy

from spark_deploy.operations.loop import each
from spark_deploy.operations.service.jobs import job, prepared
from spark_deploy.planning.types import Paths
from spark_deploy.planning.work.jobs import Job

REMOVAL_TIMEOUT_S = 3600  # every byte of the tree is read once before


@deploy("Sources")
def apply(*, jobs: Sequence[Job], release: str, paths: Paths) -> None:
    """Start fetching every source tree that has no receipt yet."""
    names = tuple(spec.digest12 for spec in jobs)
    for spec in each(spec for spec in jobs if spec.kind == "fetch"):
        job(
            name=f"Fetch {spec.title.removeprefix('fetch ')}",
            spec=spec,
            release=release,
            tools_dir=paths.tools_dir,
            names=names,
        )


@deploy("Sources")
def discard(*, jobs: Sequence[Job], release: str, paths: Paths) -> None:
    """Remove a base that is not kept, once the tree made from it is proven byte by byte."""
    for spec in each(jobs):
        job(
            name=f"Remove {spec.title.removeprefix('remove ')}",
            spec=spec,
            release=release,
            tools_dir=paths.tools_dir,
            names=(spec.digest12,),
        )
        prepared(
            name="Wait until the base is removed",
            jobs=(spec,),
            release=release,
            tools_dir=paths.tools_dir,
            timeout_s=REMOVAL_TIMEOUT_S,
        )
