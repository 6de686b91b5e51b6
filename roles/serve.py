"""Serve the release: its files, the wait for everything slow, and the switch with a way back."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy
from pyinfra.context import host, inventory
from spark_contract.gateway import GATEWAY_USER
from spark_contract.release import Release

from spark_deploy.managed import ManagedFile
from spark_deploy.operations.loop import each
from spark_deploy.operations.service.gateway import configured
from spark_deploy.operations.service.jobs import prepared
from spark_deploy.operations.service.serve import release_files, switched
from spark_deploy.planning.serving.argv import ENGINE_USER
from spark_deploy.planning.types import GatewayPlan
from spark_deploy.planning.work.jobs import Work

PREPARE_TIMEOUT_S = 6 * 3600  # a first download of 80 GB on a slow line


@deploy("Serve")
def apply(
    *,
    plan: Release,
    gateway: GatewayPlan,
    jobs: Sequence[Work],
    files: Sequence[ManagedFile],
) -> None:
    """Prepare everything while the old release answers, then change over host by host."""
    prepared(
        name="Wait until everything is prepared",
        jobs=tuple(work.job for work in jobs),
        release=plan.name,
        timeout_s=PREPARE_TIMEOUT_S,
        retire_others=True,
    )
    release_files(name="Install units and release", plan=plan, files=tuple(files),
                  users=(GATEWAY_USER, ENGINE_USER))  # fmt: skip
    configured(name="Configure the gateway", plan=gateway)
    # One operation per host in inventory order: a fault stops at the first host it meets.
    for name in each(member.name for member in inventory):
        if name == host.name:
            switched(
                name=f"Serve the release on {name}",
                plan=plan,
                timeout_s=int(plan.timeouts.start_s) * 2 + 600,
            )
