"""Have other models and profiles ready, so that a switch needs no download and no build."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy

from spark_deploy.operations.loop import each
from spark_deploy.operations.service.jobs import job, prepared
from spark_deploy.planning.work.jobs import Work, ready_name

PREPARE_TIMEOUT_S = 6 * 3600


@deploy("Ready")
def apply(*, jobs: Sequence[Work], service: str) -> None:
    """Do the slow work of pairs that are not served, after what is served is proven."""
    names = tuple(work.job.digest12 for work in jobs)
    # A prepare target of their own: the release's is retired as soon as the release is whole.
    target = f"{service}-ready"
    for work in each(jobs):
        job(
            name=ready_name(work.job),
            work=work,
            release=target,
            names=names,
        )
    prepared(
        name="Wait until the other pairs are ready",
        jobs=tuple(work.job for work in jobs),
        release=target,
        timeout_s=PREPARE_TIMEOUT_S,
    )
