"""Fetch the model's repositories, each file checked against the lock."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy

from spark_deploy.loop import each
from spark_deploy.operations.jobs import job
from spark_deploy.plan.jobs import Job
from spark_deploy.plan.types import Paths


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
