"""Have the engine image: the pinned base with our plugin, which checks itself in the build."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy

from spark_deploy.operations.loop import each
from spark_deploy.operations.service.jobs import job
from spark_deploy.planning.types import Paths
from spark_deploy.planning.work.jobs import Job


@deploy("Image")
def apply(*, jobs: Sequence[Job], release: str, paths: Paths) -> None:
    """Start building or pulling the image, unless it is there with its label."""
    names = tuple(spec.digest12 for spec in jobs)
    for spec in each(spec for spec in jobs if spec.kind.startswith("image")):
        job(
            name="Prepare the engine image",
            spec=spec,
            release=release,
            tools_dir=paths.tools_dir,
            names=names,
        )
