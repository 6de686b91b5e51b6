"""Reboots: only where settings allow them, one host at a time, with a proof before the next one."""

from __future__ import annotations

import time

import gevent
from pyinfra.api.command import FunctionCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host
from spark_contract.host import tool
from spark_contract.host.machine import BOOT_ID
from spark_contract.host.paths import RECEIPTS_DIR
from spark_contract.host.units import SERVE
from spark_contract.serving.release import Release

from spark_deploy.facts.machine.host import RebootedFor
from spark_deploy.facts.machine.survey import HostSurvey
from spark_deploy.facts.memo import read
from spark_deploy.facts.service.serve import HostStatus, Status, parse_status
from spark_deploy.operations.commands import CommandFailed, predict, run
from spark_deploy.operations.host_errors import Commands, host_command, host_errors, refuse
from spark_deploy.operations.machine.preflight import question, survey_of
from spark_deploy.operations.reconnect import run_reconnecting
from spark_deploy.operations.service.rollout import change_now, hold_back, interrupt
from spark_deploy.planning.machine import NeedsPlan

_DOWN_WITHIN_S = 600
_ASK_EVERY_S = 3.0
_MARKER = f"{RECEIPTS_DIR}/rebooted-for"


@operation()
@host_errors
def rebooted(needs: NeedsPlan, serve: Release) -> Commands:
    """Reboot a host that waits for it, and have it serve proven again before the next one."""
    why = survey_of(needs).identity.boot.pending
    if not why:
        host.noop("no reboot is pending")
        return
    if read(RebootedFor, path=_MARKER) == why:
        host.noop(f"was rebooted for this already, and it is still pending: {why}")
        return
    _must_be_understood(host, read(Status))
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
        return _serves_again(state, host, serve) and _settled(host, needs)
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


def _settled(host: Host, needs: NeedsPlan) -> bool:
    """Forget what the reboot was for when it helped; else it is not tried again for that."""
    fact = HostSurvey()
    seen = fact.process(run(host, fact.command(**question(needs)), timeout_s=180))
    left = seen.identity.boot.pending
    if left:
        host.log_styled(f"still pending after the reboot: {left}", fg="yellow")
    else:
        run(host, f"rm -f {_MARKER}")
    return True
