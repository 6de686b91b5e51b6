"""Build the checkpoint on the host; its receipt is the proof."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy

from spark_deploy.operations.loop import each
from spark_deploy.operations.service.jobs import job
from spark_deploy.planning.types import Paths
from spark_deploy.planning.work.jobs import Job


@deploy("Checkpoint")
def apply(*, jobs: Sequence[Job], release: str, paths: Paths) -> None:
    """Start the build once its base is fetched, unless its receipt is there."""
    names = tuple(spec.digest12 for spec in jobs)
    for spec in each(spec for spec in jobs if spec.kind == "checkpoint"):
        job(
            name="Build the checkpoint",
            spec=spec,
            release=release,
            tools_dir=paths.tools_dir,
            names=names,
        )
