"""Start, watch and roll back rollouts.

The host drains, stops, starts, checks and rolls back by itself (``spark-switch@RELEASE.service``):
a killed controller does not interrupt it.
"""

import re
import time
from collections.abc import Sequence
from weakref import WeakSet

import gevent
from pyinfra import host as this_host
from pyinfra.api import FunctionCommand, Host, State
from pyinfra.api.exceptions import ConnectError
from spark_contract import tool
from spark_contract.documents import parse
from spark_contract.records import Rollout
from spark_contract.status import StartedRollout
from spark_contract.tool import PHASE, SPEED
from spark_contract.units import MAIN_SERVICE

from spark_deploy.config.errors import Problem, unreachable
from spark_deploy.hosts import commands, operations
from spark_deploy.hosts.facts import read_fact
from spark_deploy.hosts.failures import describe_rollout_failure, show_failure
from spark_deploy.hosts.status import RollbackPreview, Status

CHECK_WARNING = "check warning:"
POLL_EVERY_S = 2.0
_interrupted: WeakSet[Host] = WeakSet()
_not_changed: WeakSet[Host] = WeakSet()


def record_interruption(host: Host) -> None:
    """Record that this run interrupts the service; from then on a lost connection is a failure."""
    _interrupted.add(host)


def require_no_failure(consequence: str) -> None:
    """Fail this host if another host failed during a rollout or reboot."""
    state = this_host.state
    failed = [
        other.name
        for other in state.inventory
        if state.results[other].error_ops
        and other not in _not_changed
        and (other in _interrupted or not commands.is_disconnected(other))
    ]
    if failed:
        _not_changed.add(commands.current_host())
        fix = "fix that host, or exclude it with --exclude, then retry"
        message = f"{consequence}, because {', '.join(failed)} failed first"
        operations.fail(this_host.name, message, fix)


def require_members(members: Sequence[str]) -> None:
    active = {member.name for member in this_host.state.active_hosts}
    missing = [name for name in members if name not in active]
    if missing:
        fix = "fix that host and retry; cluster members are always updated together"
        message = f"not changed, because members failed or are unreachable: {', '.join(missing)}"
        operations.fail(this_host.name, message, fix)


def run_rollout(state: State, host: Host, release: str, timeout_s: int) -> bool:
    return _begin_and_watch(state, host, tool.command_line(tool.SWITCH_BEGIN, release), timeout_s)


@operations.host_command
def _begin_and_watch(state: State, host: Host, begin_command: str, timeout_s: int) -> bool:
    record_interruption(host)
    try:
        result = commands.run_reconnecting(host, begin_command)
        if not result.ok:
            host.log_styled(f"could not start the rollout: {result.text}", fg="red")
            return False
        started = parse(StartedRollout, result.stdout)
        if started.joined:
            host.log("a rollout of this release is already running; watching it")
        # The request id distinguishes this rollout from other rollouts of the same release.
        arguments = filter(None, (started.release, started.request))
        subject = "the earlier release" if started.to else "the new release"
        poll = tool.command_line(tool.SWITCH_POLL, *arguments)
        return _watch(state, host, started.release, poll, timeout_s, subject)
    except ConnectError as error:
        fix = (
            "the host finishes or rolls back the rollout by itself; run again when it is reachable"
        )
        raise operations.HostError(unreachable(f"{host.name}: rollout", str(error), fix)) from error


def _watch(state: State, host: Host, release: str, poll: str, timeout_s: int, subject: str) -> bool:
    """Log the progress of a rollout until it ends; return whether the host switched."""
    deadline = time.monotonic() + timeout_s
    last_text, logged_at_s = "", 0.0
    # A screen updates in place and shows every number; a log shows only new steps.
    handlers = getattr(state, "callback_handlers", ())
    shows_all = any(getattr(handler, "follows_progress", False) for handler in handlers)
    while time.monotonic() < deadline:
        result = commands.run_reconnecting(host, poll)
        rollout = parse(Rollout, result.stdout) if result.ok else None
        if rollout is not None:
            text = _progress_text(rollout)
        else:
            text = f"cannot read the progress: {result.text[-300:]}"
        is_due = time.monotonic() - logged_at_s > commands.HEARTBEAT_S
        is_new_step = _without_numbers(text) != _without_numbers(last_text)
        if is_due or is_new_step or (shows_all and text != last_text):
            host.log(f"rollout of {release}: {text}")
            last_text, logged_at_s = text, time.monotonic()
        if rollout is not None and rollout.state not in ("none", "running"):
            return report_rollout(host, release, rollout, subject)
        gevent.sleep(POLL_EVERY_S)
    host.log_styled(f"rollout of {release}: still running after {timeout_s} s", fg="red")
    return False


def _progress_text(rollout: Rollout) -> str:
    parts = (rollout.progress or rollout.reason or "running").split(" ")
    progress = " ".join(part for part in parts if not part.startswith(PHASE))
    return f"{rollout.phase or 'waiting'}: {progress}"


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "", text)


def report_rollout(
    host: Host, release: str, rollout: Rollout, subject: str = "the new release"
) -> bool:
    """Log the result of a finished rollout; return whether the host switched."""
    if rollout.state == "switched":
        times = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in rollout.times_s.items())
        host.log(f"serves {release} ({times})")
        for line in rollout.warnings:
            host.log_styled(f"{CHECK_WARNING} {line}", fg="yellow")
        for line in rollout.bench:
            host.log_styled(line, fg=None if line.startswith(SPEED) else "yellow")
        return True
    show_failure(host, describe_rollout_failure(host, release, rollout, subject))
    return False


@operations.host_operation
def roll_back(service: str, target: str | None, timeout_s: int) -> operations.Commands:
    rollback = read_fact(RollbackPreview, service=service, target=target)
    if isinstance(rollback, Problem):
        if this_host.state.is_executing:
            raise operations.HostError(rollback)
        operations.log_lines(commands.current_host(), str(rollback))
        this_host.noop("cannot be rolled back")
        return
    if rollback.to is None or rollback.done:
        reason = rollback.done or "no earlier release"
        commands.log_once(reason)
        this_host.noop(reason)
        return
    serving = rollback.from_release or "nothing"
    require_no_failure(f"not changed: still serves {serving}")
    commands.log_once(f"rolling back from {serving} to {rollback.to}")
    begin = tool.command_line(tool.ROLLBACK, service, "--to", rollback.to.name)
    yield FunctionCommand(_begin_and_watch, [begin, timeout_s], {})


@operations.host_operation
def verify_rollback(service: str, configured_selection: str) -> None:
    """Fail unless the host serves a proven release.

    ``configured_selection`` is MODEL/PROFILE.
    """
    if not this_host.state.is_executing:
        this_host.noop("the service will be checked after the rollback")
        return
    status = read_fact(Status)
    state = status.service(service)
    release = state.known_good if state else None
    reason = "no release has passed its check on this host"
    if release:
        reason = status.unproven_reason(service, release)
    if reason:
        message = f"not proven: {reason}"
        fix = "run `spark-check` on the host to see which check fails, or run deploy.py"
        operations.fail(f"{this_host.name}: {release or service}", message, fix)
    served = status.release(release)
    if served is None:  # a proven service always serves a release
        raise ValueError(f"{service} serves nothing")
    selection = f"{served.model}/{served.profile}"
    next_deploy = f"the next `spark-deploy up` applies {configured_selection} again"
    if configured_selection == selection:
        next_deploy = "the next `spark-deploy up` applies the current settings"
    elif service == MAIN_SERVICE:
        next_deploy += f"; to keep this release, run `spark-deploy use {selection}`"
    this_host.log(f"serves {selection} ({served.name}), proven; {next_deploy}")
    this_host.noop("proven")
