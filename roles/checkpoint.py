"""Build the checkpoint on the host; its receipt is the proof."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy

from spark_deploy.operations.loop import each
from spark_deploy.operations.service.jobs import job
from spark_deploy.planning.work.jobs import Work


@deploy("Checkpoint")
def apply(*, jobs: Sequence[Work], release: str) -> None:
    """Start the build once its base is fetched, unless its receipt is there."""
    names = tuple(work.job.digest12 for work in jobs)
    for work in each(work for work in jobs if work.job.kind == "checkpoint"):
        job(
            name="Build the checkpoint",
            work=work,
            release=release,
            names=names,
        )
