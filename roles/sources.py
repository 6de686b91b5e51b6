"""Fetch the model's repositories, each file checked against the lock; remove a base not kept."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy

from spark_deploy.operations.loop import each
from spark_deploy.operations.service.jobs import job, prepared
from spark_deploy.planning.work.jobs import Work

REMOVAL_TIMEOUT_S = 3600  # every byte of the tree is read once before


@deploy("Sources")
def apply(*, jobs: Sequence[Work], release: str) -> None:
    """Start fetching every source tree that has no receipt yet."""
    names = tuple(work.job.digest12 for work in jobs)
    for work in each(work for work in jobs if work.job.kind == "fetch"):
        job(
            name=f"Fetch {work.job.title.removeprefix('fetch ')}",
            work=work,
            release=release,
            names=names,
        )


@deploy("Sources")
def discard(*, jobs: Sequence[Work], release: str) -> None:
    """Remove a base that is not kept, once the tree made from it is proven byte by byte."""
    for work in each(jobs):
        job(
            name=f"Remove {work.job.title.removeprefix('remove ')}",
            work=work,
            release=release,
            names=(work.job.digest12,),
        )
        prepared(
            name="Wait until the base is removed",
            jobs=(work.job,),
            release=release,
            timeout_s=REMOVAL_TIMEOUT_S,
        )
