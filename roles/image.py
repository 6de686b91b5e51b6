"""Have the engine image: the pinned base with our plugin, which checks itself in the build."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy

from spark_deploy.operations.loop import each
from spark_deploy.operations.service.jobs import job
from spark_deploy.planning.work.jobs import Work


@deploy("Image")
def apply(*, jobs: Sequence[Work], release: str) -> None:
    """Start building or pulling the image, unless it is there with its label."""
    names = tuple(work.job.digest12 for work in jobs)
    for work in each(work for work in jobs if work.job.kind.startswith("image")):
        job(
            name="Prepare the engine image",
            work=work,
            release=release,
            names=names,
        )
