"""Serve a release: install, start, roll out, verify, reboot."""

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

from spark_deploy.hosts import releases
from spark_deploy.hosts.commands import (
    CommandFailed,
    is_predicted,
    log_once,
    predict,
    run,
    run_reconnecting,
)
from spark_deploy.hosts.facts import HostFact, read_fact, read_fact_now, run_fact
from spark_deploy.hosts.files import place_files
from spark_deploy.hosts.operations import Commands, Refused, host_command, host_operation, refuse
from spark_deploy.hosts.preflight import fact_arguments, read_survey
from spark_deploy.hosts.status import (
    HostStatus,
    Status,
    UsersKnown,
    parse_status,
    start_text,
    unit_overrides_problem,
)
from spark_deploy.hosts.survey import HostSurvey
from spark_deploy.plan.gateway import base_urls
from spark_deploy.plan.types import GatewayPlan, ManagedFile, NeedsPlan


@host_operation
def install_release(plan: Release, files: Sequence[ManagedFile], users: Sequence[str]) -> Commands:
    changed = yield from place_files(tuple(files))
    if changed:
        yield "systemctl daemon-reload"
    if not read_fact(UsersKnown, users=tuple(users)).issuperset(users):
        yield tool.MAKE_USERS
    elif not changed:
        host.noop(f"release {plan.name} is in place")


@host_operation
def start_service(plan: Release, timeout_s: int) -> Commands:
    """Start the release on hosts where it interrupts no service, in parallel."""
    if plan.cluster is not None:
        host.noop("all members of a cluster change together")
        return
    status = read_fact(Status)
    if status.would_replace(plan.service, plan.name):
        host.noop("hosts replace releases in turn")
        return
    if why := _reason_to_change(plan, status):
        log_once(f"{plan.name}: {why}")
        predict(f"{plan.name} is served")
        yield releases.change_to(plan.name, timeout_s)


def _reason_to_change(plan: Release, status: HostStatus) -> str:
    """Return why the host must change; "" (with a no-op) if it need not."""
    if is_predicted(f"{plan.name} is served"):
        host.noop("already served by then")
        return ""
    if stopped := status.stopped(plan.service):
        log_once(stopped, "yellow")
        host.noop(stopped)
        return ""
    if unknown := status.unknown_versions():
        log_once(unknown, "yellow")
    why = status.unproven(plan.service, plan.name)
    if not why:
        host.noop(f"{plan.name} is running and proven")
    return why


@host_operation
def roll_out(plan: Release, timeout_s: int, scheduled: Sequence[Release] = ()) -> Commands:
    """Serve this release, checked; if that fails, the previous one returns."""
    status = read_fact(Status)
    now = status.due(plan, scheduled)
    if now != plan:
        log_once(f"serves {now.name} by schedule; {plan.name} has other times")
        host.noop(f"{now.name} is served by schedule")
        return
    if status.left_failed(plan.name) and not status.unproven(plan.service, plan.name):
        # Its process was killed after the check.
        log_once(f"{plan.name} is proven, although the process of the change was killed")
        yield f"systemctl reset-failed {SWITCH.unit(plan.name)}"
        return
    why = _reason_to_change(plan, status)
    if not why:
        return
    state = status.service(plan.service)
    releases.refuse_after_failure(
        f"not changed: stays on {(state.active if state else None) or 'nothing'}"
    )
    if plan.cluster is not None:
        releases.require_members(tuple(member.host for member in plan.cluster.members))
    back = state.rolled_back if state else None
    if back and back.to != plan.name:
        log_once(
            f"was rolled back from {back.from_release} to {back.to} ({back.at}); "
            f"group_vars select {plan.name}"
        )
    log_once(f"{plan.name}: {why}")
    yield releases.change_to(plan.name, timeout_s)


@host_operation
def check_unit_files(accepted: Sequence[str]) -> None:
    """Refuse files that change our units and appeared since preflight."""
    if paths := read_fact(Status).unit_overrides(accepted):
        raise Refused(unit_overrides_problem(paths))
    host.noop("only a deploy's files and accepted files change the units")


@host_operation
def stop_unlisted(services: Sequence[str]) -> Commands:
    """Stop and disable other services; artefacts are kept."""
    status = read_fact(Status).report
    unlisted = sorted(
        name
        for name, service in (status.services if status else {}).items()
        if name not in services and (service.active or service.enabled)
    )
    if not unlisted:
        host.noop("no other service runs")
    for name in unlisted:
        log_once(f"stops {name}: no longer listed; `deploys/prune.py` removes the artefacts")
        yield tool.command_line(tool.RETIRE_SERVICE, name)


@host_operation
def verify_service(plan: Release, gateway: GatewayPlan, scheduled: Sequence[Release] = ()) -> None:
    """Fail unless the host provably serves the release due now."""
    if not host.state.is_executing:
        host.noop("checked after the change")
        return
    status = read_fact_now(Status)
    if stopped := status.stopped(plan.service):
        host.noop(f"nothing to prove: {stopped}")
        return
    plan = status.due(plan, scheduled)
    if why := status.unproven(plan.service, plan.name):
        fix = "run again; `spark-check` on the host shows which check fails"
        refuse(f"{host.name}: {plan.name}", f"not proven: {why}", fix)
    release, live = status.release(plan.name), status.live(plan.name)
    proof = release.proof if release else None
    if proof is None or live is None:  # a proven release has both
        raise ValueError(f"{plan.name} is not proven")
    state = status.service(plan.service)
    listen = f"at {', '.join(url for url, _ in base_urls(gateway))}"
    if state and state.head:
        listen = f"for {state.head}, which answers"
    host.log(f"serves {plan.model} with profile {plan.profile} as {', '.join(plan.names)} {listen}")
    host.log(
        f"proof: {proof.level} check of {proof.checked_at}, {len(proof.checks)} checks; "
        f"one live answer in {live.seconds:.1f} s"
    )
    if proof.start_times_s:
        host.log(f"engine start: {start_text(proof.start_times_s)}")
    if proof.portable:
        host.log("portable mode: weights dequantised to BF16; proves no Spark kernel")
    if proof.stubbed:
        host.log(f"stubbed here: {', '.join(proof.stubbed)}")
    host.noop("proven")


_DOWN_WITHIN_S = 600
_POLL_S = 3.0
_MARKER = f"{RECEIPTS_DIR}/rebooted-for"


class RebootedFor(HostFact[str]):
    """Why we rebooted last, if still pending; "" otherwise.

    Written before the reboot with the id of that boot: in the same boot it never happened.
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
def reboot_host(needs: NeedsPlan, serve: Release) -> Commands:
    """Reboot a host if needed, and verify the service before the next host."""
    why = read_survey(needs).identity.boot.reboot_reason
    if not why:
        host.noop("no reboot is pending")
        return
    if read_fact(RebootedFor, path=_MARKER) == why:
        host.noop(f"was rebooted for this already, and it is still pending: {why}")
        return
    _require_readable(host, read_fact(Status))
    releases.refuse_after_failure("not rebooted")
    predict("reboot")
    yield FunctionCommand(_reboot, [why, needs, serve], {})


@host_command
def _reboot(state: State, host: Host, why: str, needs: NeedsPlan, serve: Release) -> bool:
    host.log(f"rebooting: {why}")
    releases.note_interruption(host)
    try:
        before = run(host, f"cat {BOOT_ID}")
        note = "\n".join([*before, why])
        run(host, f"mkdir -p {RECEIPTS_DIR} && cat > {_MARKER} && sync", stdin=note)
        # Detached: this command must return before the connection is lost.
        run(host, "(sleep 1; systemctl reboot) </dev/null >/dev/null 2>&1 &", timeout_s=30)
        _wait_until_back(host, before)
        return _wait_until_serving(state, host, serve) and _clear_marker(host, needs)
    except (CommandFailed, ConnectError) as error:
        fix = "check its console; the other hosts were not rebooted"
        refuse(f"{host.name}: reboot", str(error), fix)


def _wait_until_back(host: Host, before: list[str]) -> None:
    deadline = time.monotonic() + _DOWN_WITHIN_S
    while time.monotonic() < deadline:
        gevent.sleep(_POLL_S)
        ok, out, _ = run_reconnecting(host, f"cat {BOOT_ID}")
        if ok and out.split() != before:
            host.log("is back")
            return
    fix = "reboot it by hand, then run again"
    refuse(f"{host.name}: reboot", f"still up after {_DOWN_WITHIN_S} s", fix)


def _wait_until_serving(state: State, host: Host, serve: Release) -> bool:
    limit_s = int(serve.timeouts.start_s) + 600
    deadline = time.monotonic() + limit_s
    last = active = ""
    while time.monotonic() < deadline and active != "failed":
        ok, out, _ = run_reconnecting(host, tool.when_installed(tool.command_line(tool.STATUS)))
        if ok:
            status = parse_status(out)
            _require_readable(host, status)
            service = status.service(serve.service)
            if service is None or not service.enabled or service.stopped_by_hand:
                host.log("no service is enabled on it yet")
                return True
            name = service.enabled[0]
            release = status.release(name)
            active = release.active if release else ""
            if active == "active":
                return releases.change_now(state, host, name, limit_s)
            if active != last:
                last = active
                host.log(f"{name} is {active}")
        gevent.sleep(_POLL_S)
    fix = (
        f"check `journalctl -u '{SERVE.unit('*')}'` on the host; the other hosts were not rebooted"
    )
    refuse(host.name, "does not serve after the reboot", fix)


def _require_readable(host: Host, status: HostStatus) -> None:
    """It could not be checked after a reboot."""
    if status.unreadable:
        fix = "deploy it with `reboot: report` first, then allow reboots"
        refuse(host.name, status.unreadable, fix)


def _clear_marker(host: Host, needs: NeedsPlan) -> bool:
    """A marker that stays prevents a second reboot."""
    survey = run_fact(host, HostSurvey, timeout_s=180, **fact_arguments(needs))
    if pending := survey.identity.boot.reboot_reason:
        host.log_styled(f"still pending after the reboot: {pending}", fg="yellow")
    else:
        run(host, f"rm -f {_MARKER}")
    return True
