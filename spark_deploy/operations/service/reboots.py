"""Reboots: only where settings allow them, one host at a time, with a proof before the next one."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from typing import Any

import gevent
from pyinfra.api.command import FunctionCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host

from spark_deploy.errors import Problem
from spark_deploy.facts.machine.reboots import BOOT_ID, RebootedFor
from spark_deploy.facts.machine.survey import HostSurvey
from spark_deploy.facts.memo import read
from spark_deploy.operations.host_errors import Commands, host_errors, refuse, show
from spark_deploy.operations.machine.preflight import question, survey_of
from spark_deploy.operations.predicted import promise
from spark_deploy.operations.reconnect import poll
from spark_deploy.operations.running import CommandFailed, run
from spark_deploy.operations.service.rollout import change_now, held_back, interrupt
from spark_deploy.planning.types import NeedsPlan, Paths, ServePlan
from spark_deploy.preflight.reboots import pending

_DOWN_WITHIN_S = 600
_ASK_EVERY_S = 3.0


@operation()
@host_errors
def rebooted(needs: NeedsPlan, serve: ServePlan, paths: Paths) -> Commands:
    """Reboot a host that waits for it, and have it serve proven again before the next one.

    Args:
        needs: what the host must be; holds whether reboots are allowed.
        serve: the service, and how long its start may take.
        paths: where host tools and state are.
    """
    why = pending(survey_of(needs))
    if not why:
        host.noop("no reboot is pending")
        return
    if read(RebootedFor, path=_marker(paths)) == why:
        host.noop(f"was rebooted for this already, and it is still pending: {why}")
        return
    problem = held_back("not rebooted")
    if problem:
        yield refuse(problem)
        return
    promise("reboot")
    yield FunctionCommand(_reboot, [why, needs, serve, paths], {})


def _marker(paths: Paths) -> str:
    return f"{paths.state_dir}/receipts/rebooted-for"


def _reboot(
    state: State, host: Host, why: str, needs: NeedsPlan, serve: ServePlan, paths: Paths
) -> bool:
    marker = shlex.quote(_marker(paths))
    host.log(f"rebooting: {why}")
    interrupt(host)
    try:
        before = run(host, f"cat {BOOT_ID}")
        noted = "\n".join([*before, why])
        run(host, f"mkdir -p $(dirname {marker}) && cat > {marker} && sync", stdin=noted)
        # Detached, so that this command ends before the connection does.
        run(host, "(sleep 1; systemctl reboot) </dev/null >/dev/null 2>&1 &", timeout_s=30)
        if not _came_back(host, before):
            return False
        if not _serves_again(state, host, serve, paths):
            return False
        return _settled(host, needs, marker)
    except (CommandFailed, ConnectError) as error:
        fix = "look at its console; the other hosts were not rebooted"
        show(host, str(Problem(f"{host.name}: reboot", str(error), fix)))
        return False


def _came_back(host: Host, before: list[str]) -> bool:
    deadline = time.monotonic() + _DOWN_WITHIN_S
    while time.monotonic() < deadline:
        gevent.sleep(_ASK_EVERY_S)
        ok, out, _ = poll(host, f"cat {BOOT_ID}")
        if ok and out.split() != before:
            host.log("is back")
            return True
    fix = "reboot it by hand, then run again"
    show(host, str(Problem(f"{host.name}: reboot", f"still up after {_DOWN_WITHIN_S} s", fix)))
    return False


def _serves_again(state: State, host: Host, serve: ServePlan, paths: Paths) -> bool:
    """Wait until the release that boots is up, then prove it under what runs now."""
    tool = shlex.quote(f"{paths.tools_dir}/current/bin/spark-host")
    limit_s = serve.start_timeout_s + 600
    deadline = time.monotonic() + limit_s
    told = ""
    while time.monotonic() < deadline:
        status = _status(host, tool)
        if status is None:
            gevent.sleep(_ASK_EVERY_S)
            continue
        service = (status.get("services") or {}).get(serve.service) or {}
        boots = service.get("enabled") or []
        if not boots or service.get("stopped_by_hand"):
            host.log("nothing is to serve on it yet")
            return True
        unit: Mapping[str, Any] = next(
            (unit for unit in status.get("serve", ()) if unit["release"] == boots[0]), {}
        )
        if unit.get("active") == "active":
            return change_now(state, host, boots[0], paths.tools_dir, limit_s)
        if unit.get("active") == "failed":
            break
        if told != unit.get("active"):
            told = str(unit.get("active"))
            host.log(f"{boots[0]} is {told}")
        gevent.sleep(_ASK_EVERY_S)
    what = "does not serve after its reboot"
    fix = "`journalctl -u 'spark-serve@*'` on the host; the other hosts were not rebooted"
    show(host, str(Problem(host.name, what, fix)))
    return False


def _status(host: Host, tool: str) -> dict[str, Any] | None:
    """Return what the host tools say; empty where there are none, ``None`` while they fail."""
    ok, out, _ = poll(host, f"if [ -x {tool} ]; then {tool} status; else echo '{{}}'; fi")
    if not ok:
        return None
    found: dict[str, Any] = json.loads(out)
    return found


def _settled(host: Host, needs: NeedsPlan, marker: str) -> bool:
    """Forget what the reboot was for when it helped; else it is not tried again for that."""
    fact = HostSurvey()
    left = pending(fact.process(run(host, fact.command(**question(needs)), timeout_s=180)))
    if left:
        host.log_styled(f"still pending after the reboot: {left}", fg="yellow")
    else:
        run(host, f"rm -f {marker}")
    return True
