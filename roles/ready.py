"""Have other models and profiles ready, so that a switch needs no download and no build."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy

from spark_deploy.operations.loop import each
from spark_deploy.operations.service.jobs import job, prepared
from spark_deploy.planning.types import Paths
from spark_deploy.planning.work.jobs import Job, ready_name

PREPARE_TIMEOUT_S = 6 * 3600


@deploy("Ready")
def apply(*, jobs: Sequence[Job], service: str, paths: Paths) -> None:
    """Do the slow work of pairs that are not served, after what is served is proven."""
    names = tuple(spec.digest12 for spec in jobs)
    # A prepare target of their own: the release's is retired as soon as the release is whole.
    target = f"{service}-ready"
    for spec in each(jobs):
        job(
            name=ready_name(spec),
            spec=spec,
            release=target,
            tools_dir=paths.tools_dir,
            names=names,
        )
    prepared(
        name="Wait until the other pairs are ready",
        jobs=tuple(jobs),
        release=target,
        tools_dir=paths.tools_dir,
        timeout_s=PREPARE_TIMEOUT_S,
    )
