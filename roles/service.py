"""What is served: rolled out, proven, rolled back, and the hosts of it kept tidy."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy
from spark_contract.keep import Keep
from spark_contract.paths import ENGINE_USER, GATEWAY_USER
from spark_contract.release import Release
from spark_contract.units import MAIN_SERVICE

from spark_deploy.hosts.facts.jobs import Timers
from spark_deploy.hosts.facts.releases import Status, UsersKnown
from spark_deploy.hosts.operations.commands import in_waves, one_by_one
from spark_deploy.hosts.operations.files import look_at
from spark_deploy.hosts.operations.gateway import configured, gateway_paths, new_key, scheduled
from spark_deploy.hosts.operations.jobs import prepared
from spark_deploy.hosts.operations.prefetch import expect
from spark_deploy.hosts.operations.releases import pruned, rolled_back, still_proven
from spark_deploy.hosts.operations.serve import (
    proven,
    rebooted,
    release_files,
    retired,
    rolled_out,
    started,
)
from spark_deploy.plan.cluster import Wave
from spark_deploy.plan.jobs import Work
from spark_deploy.plan.machine import NeedsPlan
from spark_deploy.plan.managed_files import ManagedFile
from spark_deploy.plan.release import timer_files
from spark_deploy.plan.types import GatewayPlan, ScheduledPlan


@deploy("Reboots")
def reboot(*, plan: NeedsPlan, serve: Release) -> None:
    """Reboot hosts that wait for it, where settings allow that; each is proven before the next.

    Comes first: a host whose driver waits for a reboot would fail every later step.
    """
    if plan.reboot != "allow":
        return
    for name in one_by_one():
        rebooted(name=f"Reboot {name} where it is due", needs=plan, serve=serve)


@deploy("Prepare")
def prepare(*, jobs: Sequence[Work], release: str) -> None:
    """Have everything ready while the old releases answer."""
    prepared(
        name="Wait until everything is prepared",
        jobs=tuple(work.job for work in jobs),
        release=release,
        retire_others=True,
    )


@deploy("Serve")
def serve(
    *,
    plan: Release,
    gateway: GatewayPlan,
    files: Sequence[ManagedFile],
    waves: Sequence[Wave],
    schedule: Sequence[ScheduledPlan],
) -> None:
    """Change a service over to its release, wave by wave."""
    look_at((*(file.path for file in files), *gateway_paths(gateway)))
    users = (GATEWAY_USER, ENGINE_USER)
    expect(UsersKnown, lambda: {"users": users})
    scheduled = tuple(one.release for one in schedule)
    release_files(name="Install units and release", plan=plan, files=tuple(files), users=users)
    configured(name="Configure the gateway", plan=gateway)
    timeout_s = int(plan.timeouts.start_s) * 2 + 600
    started(name="Serve where nothing is served yet", plan=plan, timeout_s=timeout_s)
    for wave in in_waves(waves):
        what = "the release" if plan.service == MAIN_SERVICE else plan.service
        rolled_out(
            name=f"Serve {what} on {', '.join(wave)}",
            plan=plan,
            timeout_s=timeout_s,
            scheduled=scheduled,
        )


@deploy("Retire")
def retire(*, services: Sequence[str]) -> None:
    """Stop services that the settings no longer list."""
    expect(Status, long=True)
    retired(name="Stop services that are not listed any more", services=services)


@deploy("Verify")
def verify(*, plan: Release, gateway: GatewayPlan, schedule: Sequence[ScheduledPlan]) -> None:
    """Close the run: red unless the host provably serves what was planned."""
    scheduled = tuple(one.release for one in schedule)
    proven(name="Prove what is served", plan=plan, gateway=gateway, scheduled=scheduled)


@deploy("Schedule")
def schedule(*, schedule: Sequence[ScheduledPlan]) -> None:
    """Have the host change between its pairs at their times."""
    look_at(file.path for file in timer_files(schedule))
    expect(Timers)
    scheduled(
        name="Have the timers of the schedule",
        times=tuple(one.at for one in schedule),
        timers=timer_files(schedule),
    )


@deploy("Rollback")
def rollback(
    *, service: str, chosen: str, to: str | None, timeout_s: int, waves: Sequence[Wave]
) -> None:
    """Go back to the release before the current one, or to ``to``, proven as in a deploy."""
    for wave in in_waves(waves):
        rolled_back(
            name=f"Go back on {', '.join(wave)}", service=service, to=to, timeout_s=timeout_s
        )
    still_proven(name="Prove what is served", service=service, chosen=chosen)


@deploy("Prune")
def prune(*, keep: Keep) -> None:
    """Remove what ``keep`` and the releases it counts do not need."""
    pruned(name="Remove what nothing kept needs", keep=keep)


@deploy("Rotate key")
def rotate_key(*, plan: GatewayPlan) -> None:
    """Have a new key in use; clients get it with `spark-deploy connect`."""
    new_key(name="Replace the API key", plan=plan)
