"""Change the release of a host and watch it; go back to an earlier one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from weakref import WeakSet

import gevent
from pyinfra.api.command import FunctionCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import ctx_host, host
from pyinfra.context import host as current_host
from spark_contract import tool
from spark_contract.documents import parse
from spark_contract.records import Rollout
from spark_contract.status import Begun, ReleaseState
from spark_contract.tool import PHASE, SPEED
from spark_contract.units import MAIN_SERVICE

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.commands import HEARTBEAT_S, is_disconnected, log_once, run_reconnecting
from spark_deploy.hosts.facts import read_fact
from spark_deploy.hosts.host_errors import (
    Commands,
    Refused,
    host_command,
    host_errors,
    refuse,
    show,
)
from spark_deploy.hosts.status import Status, WayBack

POLL_EVERY_S = 2.0


_interrupted: WeakSet[Host] = WeakSet()


_left_alone: WeakSet[Host] = WeakSet()


def interrupt(host: Host) -> None:
    """Note that this host's serving is about to stop: should it be lost now, that may be why."""
    _interrupted.add(host)


def hold_back(what: str) -> None:
    """Refuse this host after another failed: what stops serving goes host by host up to that.

    A host that dropped out before its own change says nothing of the change, and blocks nobody.
    """
    state = current_host.state
    others = [
        other.name
        for other in state.inventory
        if state.results[other].error_ops
        and other not in _left_alone
        and (other in _interrupted or not is_disconnected(other))
    ]
    if others:
        _left_alone.add(ctx_host.get())  # type: ignore[no-untyped-call]  # pyinfra
        refuse(
            current_host.name,
            f"{what}, because {', '.join(others)} failed first",
            "repair that host, or leave it out with --limit, and run again",
        )


def require_members(members: Sequence[str]) -> None:
    """Refuse this host unless every member of its cluster is still part of the run."""
    here = {one.name for one in current_host.state.active_hosts}
    away = [name for name in members if name not in here]
    if away:
        refuse(
            current_host.name,
            f"left alone: {', '.join(away)} of its cluster failed or cannot be reached",
            "repair that host and run again; members change together",
        )


def change_to(release: str, timeout_s: int) -> FunctionCommand:
    """Return the command that begins the change to a release and watches it to its end."""
    return FunctionCommand(change_now, [release, timeout_s], {})


def change_now(state: State, host: Host, release: str, timeout_s: int) -> bool:
    """Begin the change to a release and watch it to its end; whether it went well."""
    return _begin_and_watch(state, host, tool.line(tool.SWITCH_BEGIN, release), timeout_s)


def go_back(service: str, release: str, timeout_s: int) -> FunctionCommand:
    """Return the command that goes back to a release and watches that change to its end."""
    begin = tool.line(tool.ROLLBACK, service, "--to", release)
    return FunctionCommand(_begin_and_watch, [begin, timeout_s], {})


@host_command
def _begin_and_watch(state: State, host: Host, begin: str, timeout_s: int) -> bool:
    interrupt(host)
    try:
        return _run_change(host, begin, timeout_s)
    except ConnectError as error:
        fix = "the host finishes the change, or takes it back, by itself; run again when it is back"
        refuse(f"{host.name}: change", str(error), fix)


def _run_change(host: Host, begin: str, timeout_s: int) -> bool:
    ok, out, err = run_reconnecting(host, begin)
    if not ok:
        host.log_styled(f"the change did not begin: {(err or out).strip()}", fg="red")
        return False
    begun = parse(Begun, out)
    if begun.joined:
        host.log("a change to this release is under way already; watching it")
    # The id keeps the outcome of any other change from being taken for that of this one.
    words = [begun.release, *([begun.request] if begun.request else [])]
    ask = tool.line(tool.SWITCH_POLL, *words)
    return _watch(host, begun.release, ask, timeout_s)


def _watch(host: Host, release: str, ask: str, timeout_s: int) -> bool:
    deadline = time.monotonic() + timeout_s
    last, said_at = "", 0.0
    while time.monotonic() < deadline:
        ok, out, err = run_reconnecting(host, ask)
        found = parse(Rollout, out) if ok else None
        # It may be busy for a while; but nobody shall wait without knowing.
        text = f"the host does not say how it goes: {(err or out).strip()[-300:]}"
        if found is not None:
            text = f"{found.phase or 'waiting'}: {_last_line(found)}"
        if text != last or time.monotonic() - said_at > HEARTBEAT_S:
            host.log(f"rollout of {release}: {text}")
            last, said_at = text, time.monotonic()
        if found is not None and found.state not in ("none", "running"):
            return report_change(host, release, found)
        gevent.sleep(POLL_EVERY_S)
    host.log_styled(f"rollout of {release}: still under way after {timeout_s} s", fg="red")
    return False


def _last_line(found: Rollout) -> str:
    """Return the last thing the rollout said, without the field that repeats the phase."""
    text = found.progress or found.reason or "under way"
    return " ".join(word for word in text.split(" ") if not word.startswith(PHASE))


def report_change(host: Host, release: str, found: Rollout) -> bool:
    """Say how a change ended; return whether the host serves the release."""
    if found.state == "switched":
        times = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in found.times_s.items())
        host.log(f"serves {release} ({times})")
        for line in found.warnings:
            host.log_styled(f"warning of its check: {line}", fg="yellow")
        for line in found.bench:
            host.log_styled(line, fg=None if line.startswith(SPEED) else "yellow")
        return True
    for line in found.log_tail:
        host.log(f"  {line}")
    kept = "; the host keeps what it serves" if found.serving else ""
    now = found.serving or "nothing"
    if not found.ended_at:
        # Nobody was left to write it down: the host was cut off, or the change never ran.
        now = "not known from this change; `spark-deploy status` asks the host"
    host.log_styled(
        f"{release}: {found.state} in phase {found.failed_phase or found.phase}: "
        f"{found.reason or 'it did not come to its end'}\n"
        f"  now serving: {now}\n"
        f"  fix: correct the cause above and run again{kept}",
        fg="red",
    )
    return False


@operation()
@host_errors
def roll_back(service: str, to: str | None, timeout_s: int) -> Commands:
    """Serve the release before the current one, or a named one, proven again."""
    way = read_fact(WayBack, service=service, to=to)
    if isinstance(way, Problem):
        if not host.state.is_executing:  # nobody shall read of a change where there will be none
            show(ctx_host.get(), str(way))  # type: ignore[no-untyped-call]  # pyinfra
            host.noop("refused")
            return
        raise Refused(way)
    if way.to is None or way.done:
        why = way.done or "nothing to go back to"
        log_once(why)
        host.noop(why)
        return
    came = way.came or "nothing"
    hold_back(f"left alone on {came}")
    log_once(f"goes back from {came} to {way.to}")
    yield go_back(service, way.to.name, timeout_s)


@operation()
@host_errors
def verify_rollback(service: str, chosen: str) -> None:
    """Refuse to call a rollback good unless what the host serves is proven.

    Args:
        service: what went back.
        chosen: the MODEL/PROFILE of it that the settings say, or "none".
    """
    if not host.state.is_executing:
        host.noop("judged after the change")
        return
    status = read_fact(Status)
    state = status.service(service)
    release = state.good if state else None
    why = status.unproven(service, release) if release else "no release was ever proven here"
    if why:
        refuse(
            f"{host.name}: {release or service}",
            f"not proven: {why}",
            "`spark-check` on the host says which check fails; deploy.py repairs the rest",
        )
    host.log(_describe_rollback(service, status.release(release), chosen))
    host.noop("proven")


def _describe_rollback(service: str, serves: ReleaseState | None, chosen: str) -> str:
    """Say what serves after a rollback, and that the settings still say what they said."""
    if serves is None:  # said of a service that is proven
        raise ValueError(f"{service} serves nothing")
    pair = f"{serves.model}/{serves.profile}"
    next_up = "the next `spark-deploy up` goes to"
    then = f"{next_up} {chosen} again"
    if chosen == pair:
        then = f"{next_up} what the settings say of it now"
    elif service == MAIN_SERVICE:
        then += f"; to stay: `spark-deploy use {pair}`"
    return f"serves {pair} ({serves.name}), proven; {then}"
