"""Roll out, verify, roll back, schedule and prune services."""

from collections.abc import Sequence

from pyinfra import inventory
from pyinfra.api import deploy
from spark_contract.gateway import NamedKey
from spark_contract.paths import ENGINE_USER, GATEWAY_USER
from spark_contract.release import Release
from spark_contract.status import KeepList
from spark_contract.units import MAIN_SERVICE

from spark_deploy.hosts.base import BaseState, fact_arguments, install_packages
from spark_deploy.hosts.commands import waves_of_this_host
from spark_deploy.hosts.facts import expect_fact
from spark_deploy.hosts.files import expect_files
from spark_deploy.hosts.gateway import (
    Timers,
    configure_gateway,
    gateway_paths,
    replace_key,
    set_named_keys,
    set_timers,
)
from spark_deploy.hosts.jobs import compare_donor_tensors, wait_for_jobs
from spark_deploy.hosts.releases import roll_back, verify_rollback
from spark_deploy.hosts.serve import (
    check_unit_files,
    install_release,
    reboot_host,
    roll_out,
    start_service,
    stop_unlisted,
    verify_service,
)
from spark_deploy.hosts.status import ExistingUsers, Status
from spark_deploy.hosts.uninstall import prune_host
from spark_deploy.plan.cluster import Wave
from spark_deploy.plan.jobs import Work
from spark_deploy.plan.release import timer_files
from spark_deploy.plan.types import (
    NJS,
    BasePlan,
    GatewayPlan,
    ManagedFile,
    PreflightPlan,
    ScheduledPlan,
)


@deploy("Reboots")
def reboot(*, plan: PreflightPlan, release: Release) -> None:
    """Reboot hosts in sequence if needed and allowed.

    Reboots come first, because a driver that needs a reboot would make later steps fail.
    """
    if plan.reboot != "allow":
        return
    for (name,) in waves_of_this_host((member.name,) for member in inventory):
        reboot_host(name=f"Reboot {name} if required", plan=plan, release=release)


@deploy("Prepare")
def prepare(*, jobs: Sequence[Work], release: str) -> None:
    """Wait for all jobs and compare FP8 source tensors; the old releases keep serving."""
    wait_for_jobs(
        name="Wait for all jobs",
        jobs=tuple(work.job for work in jobs),
        release=release,
        retire_others=True,
    )
    compare_donor_tensors(name="Compare the FP8 source tensors of hosts", jobs=tuple(jobs))


@deploy("Serve")
def serve(
    *,
    release: Release,
    gateway: GatewayPlan,
    files: Sequence[ManagedFile],
    waves: Sequence[Wave],
    schedule: Sequence[ScheduledPlan],
) -> None:
    expect_files((*(file.path for file in files), *gateway_paths(gateway)))
    users = (GATEWAY_USER, ENGINE_USER)
    expect_fact(ExistingUsers, lambda: {"users": users})
    install_release(
        name="Install units and release", release=release, files=tuple(files), users=users
    )
    configure_gateway(name="Configure the gateway", plan=gateway)
    timeout_s = int(release.timeouts.start_s) * 2 + 600
    start_service(name="Start new services", release=release, timeout_s=timeout_s)
    subject = "the release" if release.service == MAIN_SERVICE else release.service
    scheduled = tuple(entry.release for entry in schedule)
    for wave in waves_of_this_host(waves):
        name = f"Serve {subject} on {', '.join(wave)}"
        roll_out(name=name, release=release, timeout_s=timeout_s, scheduled=scheduled)


@deploy("Retire")
def retire(*, services: Sequence[str], accepted_overrides: Sequence[str]) -> None:
    """Check unit files and stop unlisted services before anything starts."""
    expect_fact(Status, slow=True)
    check_unit_files(name="Check unit files", accepted=accepted_overrides)
    stop_unlisted(name="Stop unlisted services", services=services)


@deploy("Verify")
def verify(*, release: Release, gateway: GatewayPlan, schedule: Sequence[ScheduledPlan]) -> None:
    """Fail unless the host serves this release and the release has passed its check."""
    scheduled = tuple(entry.release for entry in schedule)
    verify_service(name="Verify the service", release=release, gateway=gateway, scheduled=scheduled)


@deploy("Schedule")
def schedule(*, schedule: Sequence[ScheduledPlan]) -> None:
    timers, times = timer_files(schedule), tuple(entry.at for entry in schedule)
    expect_files(file.path for file in timers)
    expect_fact(Timers)
    set_timers(name="Set the timers of the schedule", times=times, timers=timers)


@deploy("Rollback")
def rollback(
    *,
    service: str,
    configured_selection: str,
    target: str | None,
    timeout_s: int,
    waves: Sequence[Wave],
) -> None:
    for wave in waves_of_this_host(waves):
        name = f"Roll back on {', '.join(wave)}"
        roll_back(name=name, service=service, target=target, timeout_s=timeout_s)
    verify_rollback(
        name="Verify the service", service=service, configured_selection=configured_selection
    )


@deploy("Prune")
def prune(*, keep: KeepList) -> None:
    prune_host(name="Remove artifacts that no kept release needs", keep=keep)


@deploy("Rotate key")
def rotate_key(*, plan: GatewayPlan) -> None:
    """Replace the API key; `spark-deploy connect` prints the new key."""
    replace_key(name="Replace the API key", plan=plan)


@deploy("Named keys")
def named_keys(*, plan: BasePlan, keys: dict[str, NamedKey] | None) -> None:
    expect_fact(BaseState, lambda: fact_arguments(plan))
    if keys:  # revoking all keys must work without apt
        install_packages(name="Install nginx's JavaScript module", plan=plan, packages=(NJS,))
    set_named_keys(name="Set the named API keys", keys=keys)
