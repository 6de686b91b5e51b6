"""Install, start, roll out and verify releases, and reboot hosts."""

import shlex
import time
from collections.abc import Iterable, Sequence

import gevent
from pyinfra import host
from pyinfra.api import FunctionCommand, Host, State
from pyinfra.api.exceptions import ConnectError
from spark_contract import tool
from spark_contract.machine import BOOT_ID
from spark_contract.paths import RECEIPTS_DIR
from spark_contract.release import Release
from spark_contract.units import SERVE, SWITCH

from spark_deploy.hosts import commands, releases
from spark_deploy.hosts.facts import HostFact, read_fact, read_fact_now, run_fact
from spark_deploy.hosts.files import place_files
from spark_deploy.hosts.operations import Commands, HostError, fail, host_command, host_operation
from spark_deploy.hosts.preflight import fact_arguments, read_survey
from spark_deploy.hosts.status import (
    ON_REQUEST,
    ExistingUsers,
    HostStatus,
    Status,
    describe_start,
    parse_status,
    unit_overrides_problem,
)
from spark_deploy.hosts.survey import HostSurvey
from spark_deploy.plan.gateway import base_urls
from spark_deploy.plan.types import GatewayPlan, ManagedFile, PreflightPlan


@host_operation
def install_release(
    release: Release, files: Sequence[ManagedFile], users: Sequence[str]
) -> Commands:
    changed = yield from place_files(tuple(files))
    if changed:
        yield "systemctl daemon-reload"
    if not read_fact(ExistingUsers, users=tuple(users)).issuperset(users):
        yield tool.MAKE_USERS
    elif not changed:
        host.noop(f"release {release.name} is installed")


@host_operation
def start_service(release: Release, timeout_s: int) -> Commands:
    """Start the release, in parallel, on all hosts where this interrupts no service."""
    if release.cluster is not None:
        host.noop("a later operation updates all cluster members together")
        return
    status = read_fact(Status)
    if status.would_replace(release.service, release.name):
        host.noop("a later operation replaces the current release, one wave of hosts at a time")
        return
    if reason := _rollout_reason(release, status):
        commands.log_once(f"{release.name}: {reason}")
        commands.record_planned_change(f"{release.name} is served")
        yield FunctionCommand(releases.run_rollout, [release.name, timeout_s], {})


def _rollout_reason(release: Release, status: HostStatus) -> str:
    """Return why the release must be rolled out; if it need not be, log why and return ""."""
    if commands.is_planned(f"{release.name} is served"):
        host.noop("an earlier operation starts this release")
        return ""
    if message := status.stop_message(release.service):
        commands.log_once(message, "yellow")
        host.noop(message)
        return ""
    if message := status.unknown_versions_message():
        commands.log_once(message, "yellow")
    reason = status.unproven_reason(release.service, release.name)
    if not reason:
        is_waiting = status.waits_for_request(release.service, release.name)
        state = ON_REQUEST if is_waiting else "running"
        host.noop(f"{release.name} is {state} and has passed its checks")
    return reason


@host_operation
def roll_out(release: Release, timeout_s: int, scheduled: Sequence[Release] = ()) -> Commands:
    """Serve and check this release; if it fails, the host restores the previous release."""
    status = read_fact(Status)
    due = status.expected_release(release, scheduled)
    if due != release:
        message = f"keeping {due.name}, which is scheduled now"
        commands.log_once(f"{message}; {release.name} is scheduled for other times")
        host.noop(message)
        return
    is_proven = not status.unproven_reason(release.service, release.name)
    if status.has_failed_change(release.name) and is_proven:
        commands.log_once(f"{release.name} passed its check before the rollout process was killed")
        yield f"systemctl reset-failed {SWITCH.unit(release.name)}"
        return
    reason = _rollout_reason(release, status)
    if not reason:
        return
    state = status.service(release.service)
    serving = (state.active if state else None) or "nothing"
    releases.require_no_failure(f"not changed: still serves {serving}")
    if release.cluster is not None:
        releases.require_members(tuple(member.host for member in release.cluster.members))
    rollback = state.rolled_back if state else None
    if rollback and rollback.to != release.name:
        commands.log_once(
            f"the host was rolled back from {rollback.from_release} to {rollback.to} "
            f"at {rollback.at}, but the settings select {release.name}"
        )
    commands.log_once(f"{release.name}: {reason}")
    yield FunctionCommand(releases.run_rollout, [release.name, timeout_s], {})


@host_operation
def check_unit_files(accepted: Sequence[str]) -> None:
    """Fail if files that change our units appeared since preflight."""
    if paths := read_fact(Status).unit_overrides(accepted):
        raise HostError(unit_overrides_problem(paths))
    host.noop("no unmanaged unit files or drop-ins")


@host_operation
def stop_unlisted(services: Sequence[str]) -> Commands:
    report = read_fact(Status).report
    unlisted = sorted(
        name
        for name, service in (report.services if report else {}).items()
        if name not in services and (service.active or service.enabled)
    )
    if not unlisted:
        host.noop("no other service is running")
    for name in unlisted:
        message = f"stopping {name}, which is no longer listed"
        commands.log_once(f"{message}; `deploys/prune.py` removes its files")
        yield tool.command_line(tool.RETIRE_SERVICE, name)


@host_operation
def verify_service(
    release: Release, gateway: GatewayPlan, scheduled: Sequence[Release] = ()
) -> None:
    """Fail unless the host serves the release that is due now, and the check passed."""
    if not host.state.is_executing:
        host.noop("the service will be checked after the rollout")
        return
    status = read_fact_now(Status)
    if message := status.stop_message(release.service):
        host.noop(f"nothing to verify: {message}")
        return
    due = status.expected_release(release, scheduled)
    if reason := status.unproven_reason(due.service, due.name):
        fix = "run again; `spark-check` on the host shows which check fails"
        fail(f"{host.name}: {due.name}", f"not proven: {reason}", fix)
    if status.waits_for_request(due.service, due.name):
        host.noop(f"{due.service}: {ON_REQUEST}")
        return
    state, live = status.release(due.name), status.live_check(due.name)
    proof = state.proof if state else None
    if proof is None or live is None:  # a proven release has both
        raise ValueError(f"{due.name} is not proven")
    service = status.service(due.service)
    address = f"at {', '.join(url for url, _ in base_urls(gateway))}"
    if service and service.head:
        address = f"as a worker of {service.head}, which serves requests"
    names = ", ".join(due.names)
    host.log(f"serves {due.model} with profile {due.profile} as {names} {address}")
    host.log(
        f"proof: {proof.level} check of {proof.checked_at}, {len(proof.checks)} checks; "
        f"one live answer in {live.seconds:.1f} s"
    )
    if proof.start_times_s:
        host.log(f"engine start: {describe_start(proof.start_times_s)}")
    if proof.portable:
        host.log("portable mode: weights are dequantized to BF16, so no Spark kernel was tested")
    if proof.stubbed:
        host.log(f"stubbed here: {', '.join(proof.stubbed)}")
    host.noop("proven")


_REBOOT_TIMEOUT_S = 600
_POLL_INTERVAL_S = 3.0
_MARKER = f"{RECEIPTS_DIR}/rebooted-for"


class LastRebootReason(HostFact[str]):
    """The reason for our last reboot; "" if there is none.

    The marker starts with the boot id before the reboot. If that id is still current, the host did
    not reboot.
    """

    default = str

    def command(self, path: str) -> str:
        marker = shlex.quote(path)
        return (
            f'[ -f {marker} ] && [ "$(head -n 1 {marker})" != "$(cat {BOOT_ID})" ] '
            f"&& tail -n +2 {marker} || true"
        )

    def process(self, output: Iterable[str]) -> str:
        return "\n".join(output).strip()


@host_operation
def reboot_host(plan: PreflightPlan, release: Release) -> Commands:
    """Reboot a host if needed, and verify the service before the next host reboots."""
    reason = read_survey(plan).identity.boot.reboot_reason
    if not reason:
        host.noop("no reboot is pending")
        return
    if read_fact(LastRebootReason, path=_MARKER) == reason:
        message = "the reason persists after a reboot, so the host is not rebooted again"
        host.noop(f"{message}: {reason}")
        return
    _require_readable(host, read_fact(Status))
    releases.require_no_failure("not rebooted")
    commands.record_planned_change("reboot")
    yield FunctionCommand(_reboot, [reason, plan, release], {})


@host_command
def _reboot(state: State, host: Host, reason: str, plan: PreflightPlan, release: Release) -> bool:
    host.log(f"rebooting: {reason}")
    releases.record_interruption(host)
    try:
        boot_id = "\n".join(commands.run(host, f"cat {BOOT_ID}")).strip()
        marker = f"{boot_id}\n{reason}"
        commands.run(host, f"mkdir -p {RECEIPTS_DIR} && cat > {_MARKER} && sync", stdin=marker)
        # The reboot runs in the background, so that this command returns before the host is gone.
        commands.run(host, "(sleep 1; systemctl reboot) </dev/null >/dev/null 2>&1 &", timeout_s=30)
        _wait_until_rebooted(host, boot_id)
        return _wait_until_serving(state, host, release) and _clear_marker(host, plan)
    except (commands.CommandError, ConnectError) as error:
        fix = "check the host's console; the other hosts were not rebooted"
        fail(f"{host.name}: reboot", str(error), fix)


def _wait_until_rebooted(host: Host, old_boot_id: str) -> None:
    deadline = time.monotonic() + _REBOOT_TIMEOUT_S
    while time.monotonic() < deadline:
        gevent.sleep(_POLL_INTERVAL_S)
        result = commands.run_reconnecting(host, f"cat {BOOT_ID}")
        if result.ok and result.stdout.strip() != old_boot_id:
            host.log("the host has rebooted")
            return
    message = f"the host did not reboot within {_REBOOT_TIMEOUT_S} s"
    fail(f"{host.name}: reboot", message, "reboot the host by hand, then retry")


def _wait_until_serving(state: State, host: Host, target: Release) -> bool:
    """Wait until the release that starts at boot is running, then check it."""
    timeout_s = int(target.timeouts.start_s) + 600
    deadline = time.monotonic() + timeout_s
    unit_state = ""
    status_command = tool.when_installed(tool.command_line(tool.STATUS))
    while time.monotonic() < deadline and unit_state != "failed":
        result = commands.run_reconnecting(host, status_command)
        if result.ok:
            status = parse_status(result.stdout)
            _require_readable(host, status)
            service = status.service(target.service)
            if service is None or not service.enabled or service.stopped_by_hand:
                host.log("no service starts at boot on this host")
                return True
            name = service.enabled[0]
            release = status.release(name)
            last_state, unit_state = unit_state, release.active if release else ""
            if unit_state == "active":
                return releases.run_rollout(state, host, name, timeout_s)
            if unit_state != last_state:
                host.log(f"{name} is {unit_state}")
        gevent.sleep(_POLL_INTERVAL_S)
    fix = f"check `journalctl -u '{SERVE.unit('*')}'`; the other hosts were not rebooted"
    fail(host.name, "the host is not serving after the reboot", fix)


def _require_readable(host: Host, status: HostStatus) -> None:
    if status.unreadable:
        fix = "first deploy this host with `reboot: report`, then allow reboots"
        fail(host.name, status.unreadable, fix)


def _clear_marker(host: Host, plan: PreflightPlan) -> bool:
    """Remove the marker, unless a reboot is still pending; the marker then prevents another one."""
    survey = run_fact(host, HostSurvey, timeout_s=180, **fact_arguments(plan))
    if pending := survey.identity.boot.reboot_reason:
        host.log_styled(f"a reboot is still pending after the reboot: {pending}", fg="yellow")
    else:
        commands.run(host, f"rm -f {_MARKER}")
    return True
