"""Serve a release: install, start, roll out, verify, reboot."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence

import gevent
from pyinfra.api.command import FunctionCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host
from spark_contract import tool
from spark_contract.machine import BOOT_ID
from spark_contract.paths import RECEIPTS_DIR
from spark_contract.release import Release
from spark_contract.units import SERVE, SWITCH

from spark_deploy.hosts.commands import (
    CommandFailed,
    is_predicted,
    log_once,
    predict,
    run,
    run_reconnecting,
)
from spark_deploy.hosts.facts import HostFact, read_fact, read_fact_now
from spark_deploy.hosts.files import place_files
from spark_deploy.hosts.host_errors import Commands, host_command, host_errors, refuse
from spark_deploy.hosts.preflight import fact_arguments, read_survey
from spark_deploy.hosts.releases import change_now, change_to, hold_back, interrupt, require_members
from spark_deploy.hosts.status import HostStatus, Status, UsersKnown, parse_status
from spark_deploy.hosts.survey import HostSurvey
from spark_deploy.plan.gateway import base_urls
from spark_deploy.plan.machine import NeedsPlan
from spark_deploy.plan.managed_files import ManagedFile
from spark_deploy.plan.types import GatewayPlan


# The change itself (drain, stop, memory gate, start, check, way back) runs on the host as
# ``spark-switch@RELEASE.service``, so that no killed controller can leave it half way; here we
# only decide, start and watch.
@operation()
@host_errors
def install_release(plan: Release, files: Sequence[ManagedFile], users: Sequence[str]) -> Commands:
    """Have the units, the release and the accounts of gateway and engine on the host."""
    changed = yield from place_files(tuple(files))
    if changed:
        yield "systemctl daemon-reload"
    if not read_fact(UsersKnown, users=tuple(users)).issuperset(users):
        yield tool.MAKE_USERS
        changed = True
    if not changed:
        host.noop(f"release {plan.name} is in place")


@operation()
@host_errors
def start_service(plan: Release, timeout_s: int) -> Commands:
    """Serve this release where no proven one is replaced: there is nothing to lose by a failure.

    All such hosts start at once, whatever became of others.
    """
    if plan.cluster is not None:
        host.noop("members of a cluster change together, in their turn")
        return
    status = read_fact(Status)
    if status.has_to_lose(plan.service, plan.name):
        host.noop("what it serves is replaced in its turn")
        return
    why = _why_change(plan, status)
    if why:
        log_once(f"{plan.name}: {why}")
        predict(_served(plan))
        yield change_to(plan.name, timeout_s)


def _served(plan: Release) -> str:
    return f"{plan.name} is served"


def _why_change(plan: Release, status: HostStatus) -> str:
    """Say why the host has to change to this release; "" when it has not, which is noted."""
    if is_predicted(_served(plan)):
        host.noop("is served by then")
        return ""
    stopped = status.stopped(plan.service)
    if stopped:
        log_once(stopped, "yellow")
        host.noop(stopped)
        return ""
    unknown = status.unknown_versions()
    if unknown:
        log_once(unknown, "yellow")
    why = status.unproven(plan.service, plan.name)
    if not why:
        host.noop(f"{plan.name} is running and proven")
    return why


@operation()
@host_errors
def roll_out(plan: Release, timeout_s: int, scheduled: Sequence[Release] = ()) -> Commands:
    """Serve this release, proven; the one before comes back when that fails."""
    status = read_fact(Status)
    now = status.due(plan, scheduled)
    if now != plan:
        log_once(f"serves {now.name} by its schedule; {plan.name} has its time, too")
        host.noop(f"{now.name} is served by its schedule")
        return
    if status.left_failed(plan.name) and not status.unproven(plan.service, plan.name):
        # Its process was killed after the proof: nothing is left to change, but to say so.
        log_once(f"the change to {plan.name} was ended by force, and it is proven all the same")
        yield f"systemctl reset-failed {SWITCH.of(plan.name)}"
        return
    why = _why_change(plan, status)
    if not why:
        return
    state = status.service(plan.service)
    hold_back(f"left alone on {(state.active if state else None) or 'nothing'}")
    if plan.cluster is not None:
        require_members(tuple(member.host for member in plan.cluster.members))
    back = state.rolled_back if state else None
    if back and back.to != plan.name:
        log_once(f"was rolled back from {back.came} to {back.to} ({back.at}); "
             f"group_vars say {plan.name}")  # fmt: skip
    log_once(f"{plan.name}: {why}")
    yield change_to(plan.name, timeout_s)


@operation()
@host_errors
def stop_unlisted(services: Sequence[str]) -> Commands:
    """Have no service run, or boot, that is not among ``services``; what it made is kept."""
    told = read_fact(Status).told
    over = sorted(
        name
        for name, one in (told.services if told else {}).items()
        if name not in services and (one.active or one.enabled)
    )
    if not over:
        host.noop("no other service runs")
        return
    for name in over:
        log_once(
            f"{name} is not listed any more: it stops; `deploys/prune.py` removes what it made"
        )
        yield tool.line(tool.RETIRE_SERVICE, name)


@operation()
@host_errors
def verify_service(plan: Release, gateway: GatewayPlan, scheduled: Sequence[Release] = ()) -> None:
    """Refuse to call the run good unless the host provably serves what it is to serve now."""
    if not host.state.is_executing:
        host.noop("judged after the change")
        return
    status = read_fact_now(Status)
    stopped = status.stopped(plan.service)
    if stopped:
        host.noop(f"nothing to prove: {stopped}")
        return
    plan = status.due(plan, scheduled)
    why = status.unproven(plan.service, plan.name)
    if why:
        refuse(
            f"{host.name}: {plan.name}",
            f"not proven: {why}",
            "run again; `spark-check` on the host says which check fails",
        )
    for line in summary(plan, gateway, status):
        host.log(line)
    host.noop("proven")


def summary(plan: Release, gateway: GatewayPlan, status: HostStatus) -> list[str]:
    """Say in a few lines what a host serves and what that was proven with."""
    found, live = status.release(plan.name), status.live(plan.name)
    proof = found.proof if found else None
    if proof is None or live is None:  # said of a host that serves this provably
        raise ValueError(f"nothing is proven of {plan.name}")
    listen = f"at {', '.join(url for url, _ in base_urls(gateway))}"
    state = status.service(plan.service)
    if state and state.head:
        listen = f"for {state.head}, which answers"
    lines = [
        f"serves {plan.model} with profile {plan.profile} as {', '.join(plan.names)} {listen}",
        f"proof: {proof.level} check of {proof.checked_at}, {len(proof.checks)} checks; "
        f"one live answer in {live.seconds:.1f} s",
    ]
    if proof.portable:
        lines.append("portable mode: weights dequantised to BF16; proves no Spark kernel")
    if proof.stubbed:
        lines.append(f"stubbed here: {', '.join(proof.stubbed)}")
    return lines


_DOWN_WITHIN_S = 600


_ASK_EVERY_S = 3.0


_MARKER = f"{RECEIPTS_DIR}/rebooted-for"


class RebootedFor(HostFact[str]):
    """The reason of our last reboot if it is still pending; "" otherwise.

    It is written before the reboot, with the id of the boot that was to end: in that same boot the
    reboot never happened.
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


@operation()
@host_errors
def reboot_host(needs: NeedsPlan, serve: Release) -> Commands:
    """Reboot a host that waits for it, and have it serve proven again before the next one."""
    why = read_survey(needs).identity.boot.pending
    if not why:
        host.noop("no reboot is pending")
        return
    if read_fact(RebootedFor, path=_MARKER) == why:
        host.noop(f"was rebooted for this already, and it is still pending: {why}")
        return
    _must_be_understood(host, read_fact(Status))
    hold_back("not rebooted")
    predict("reboot")
    yield FunctionCommand(_reboot, [why, needs, serve], {})


@host_command
def _reboot(state: State, host: Host, why: str, needs: NeedsPlan, serve: Release) -> bool:
    host.log(f"rebooting: {why}")
    interrupt(host)
    try:
        before = run(host, f"cat {BOOT_ID}")
        noted = "\n".join([*before, why])
        run(host, f"mkdir -p {RECEIPTS_DIR} && cat > {_MARKER} && sync", stdin=noted)
        # Detached, so that this command ends before the connection does.
        run(host, "(sleep 1; systemctl reboot) </dev/null >/dev/null 2>&1 &", timeout_s=30)
        _wait_until_back(host, before)
        return _serves_again(state, host, serve) and _clear_marker(host, needs)
    except (CommandFailed, ConnectError) as error:
        fix = "look at its console; the other hosts were not rebooted"
        refuse(f"{host.name}: reboot", str(error), fix)


def _wait_until_back(host: Host, before: list[str]) -> None:
    deadline = time.monotonic() + _DOWN_WITHIN_S
    while time.monotonic() < deadline:
        gevent.sleep(_ASK_EVERY_S)
        ok, out, _ = run_reconnecting(host, f"cat {BOOT_ID}")
        if ok and out.split() != before:
            host.log("is back")
            return
    fix = "reboot it by hand, then run again"
    refuse(f"{host.name}: reboot", f"still up after {_DOWN_WITHIN_S} s", fix)


def _serves_again(state: State, host: Host, serve: Release) -> bool:
    """Wait until the release that boots is up, then prove it under what runs now."""
    limit_s = int(serve.timeouts.start_s) + 600
    deadline = time.monotonic() + limit_s
    told = ""
    while time.monotonic() < deadline:
        status = _status(host)
        if status is None:
            gevent.sleep(_ASK_EVERY_S)
            continue
        _must_be_understood(host, status)
        service = status.service(serve.service)
        if service is None or not service.enabled or service.stopped_by_hand:
            host.log("nothing is to serve on it yet")
            return True
        boots = status.release(service.enabled[0])
        active = boots.active if boots else ""
        if active == "active":
            return change_now(state, host, service.enabled[0], limit_s)
        if active == "failed":
            break
        if told != active:
            told = active
            host.log(f"{service.enabled[0]} is {told}")
        gevent.sleep(_ASK_EVERY_S)
    what = "does not serve after its reboot"
    fix = f"`journalctl -u '{SERVE.of('*')}'` on the host; the other hosts were not rebooted"
    refuse(host.name, what, fix)


def _must_be_understood(host: Host, status: HostStatus) -> None:
    """Refuse a host of which nobody could tell whether it serves again."""
    if status.unreadable:
        fix = "deploy it with `reboot: report` first, then allow reboots"
        refuse(host.name, status.unreadable, fix)


def _status(host: Host) -> HostStatus | None:
    """Return what the host tools say, ``None`` while they fail."""
    ok, out, _ = run_reconnecting(host, tool.when_installed(tool.line(tool.STATUS)))
    return parse_status(out) if ok else None


def _clear_marker(host: Host, needs: NeedsPlan) -> bool:
    """Forget what the reboot was for when it helped; else it is not tried again for that."""
    fact = HostSurvey()
    seen = fact.process(run(host, fact.command(**fact_arguments(needs)), timeout_s=180))
    left = seen.identity.boot.pending
    if left:
        host.log_styled(f"still pending after the reboot: {left}", fg="yellow")
    else:
        run(host, f"rm -f {_MARKER}")
    return True
