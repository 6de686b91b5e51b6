"""Releases: put one on the host, switch to it, say what the host serves.

The change itself (drain, stop, memory gate, start, check, way back) runs on the host as
``spark-switch@RELEASE.service``, so that no killed controller can leave it half way; here we only
decide, start and watch.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Generator, Sequence
from typing import Any

import gevent
from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host

from spark_deploy.errors import Problem
from spark_deploy.facts.memo import read
from spark_deploy.facts.serve import HostStatus, Status, UserExists
from spark_deploy.managed import ManagedFile
from spark_deploy.operations.failing import host_errors, refuse
from spark_deploy.operations.files import place
from spark_deploy.operations.remote import poll
from spark_deploy.operations.running import SAY_SOMETHING_EVERY_S
from spark_deploy.plan.gateway import base_urls
from spark_deploy.plan.types import GatewayPlan, Paths, ServePlan

POLL_EVERY_S = 2.0


@operation()
@host_errors
def release_files(
    plan: ServePlan, files: Sequence[ManagedFile], user: str
) -> Generator[Any, None, None]:
    """Have the units, the release and the gateway's user on the host.

    Args:
        plan: the release, for messages.
        files: everything that belongs to it.
        user: system user the gateway's workers run as.
    """
    changed = yield from place(tuple(files))
    if changed:
        yield "systemctl daemon-reload"
    if not host.get_fact(UserExists, user=user):
        yield "systemd-sysusers /etc/sysusers.d/spark.conf"
        changed = True
    if not changed:
        host.noop(f"release {plan.name} is in place")


@operation()
@host_errors
def switched(plan: ServePlan, paths: Paths, timeout_s: int) -> Generator[Any, None, None]:
    """Serve this release, proven; the one before comes back when that fails.

    Args:
        plan: the release.
        paths: where the host tools are.
        timeout_s: give up watching after this long; the host finishes by itself.
    """
    status = read(Status, tools_dir=paths.tools_dir)
    by_hand = status.service(plan.service).get("stopped_by_hand")
    if by_hand:
        host.noop(f"{plan.service} was stopped by hand ({by_hand.get('at')}); left alone")
        return
    why = status.unproven(plan.service, plan.name)
    if not why:
        host.noop(f"{plan.name} is running and proven")
        return
    others = failed_hosts()
    if others:
        yield refuse(
            Problem(
                host.name,
                f"left alone on {status.service(plan.service).get('active') or 'nothing'}, "
                f"because {', '.join(others)} failed first",
                "repair that host, or leave it out with --limit, and run again",
            )
        )
        return
    host.log(f"{plan.name}: {why}")
    unit = f"spark-switch@{plan.name}.service"
    yield StringCommand(
        "sh", "-c",
        shlex.quote(
            # What an earlier change left would read as the outcome of this one.
            f"rm -f {shlex.quote(f'{paths.state_dir}/switch/{plan.name}.json')}; "
            f"systemctl daemon-reload; systemctl reset-failed {unit} 2>/dev/null; "
            f"systemctl start --no-block {unit}"
        ),
    )  # fmt: skip
    yield FunctionCommand(watch_switch, [plan.name, paths.tools_dir, timeout_s], {})


def failed_hosts() -> list[str]:
    """Return the hosts we did reach and on which an operation failed."""
    state = host.state
    return [other.name for other in state.inventory if state.results[other].error_ops]


def watch_switch(state: State, host: Host, release: str, tools_dir: str, timeout_s: int) -> bool:
    """Show how a change of release goes on until it has ended; whether it went well."""
    tool = shlex.quote(f"{tools_dir}/current/bin/spark-host")
    deadline = time.monotonic() + timeout_s
    last, said_at = "", 0.0
    while time.monotonic() < deadline:
        ok, out, _err = poll(host, f"{tool} switch-poll {shlex.quote(release)}")
        result: dict[str, Any] = json.loads(out) if ok and out.strip() else {}
        text = f"{result.get('phase') or 'waiting'}: {_said(result)}"
        if text != last or time.monotonic() - said_at > SAY_SOMETHING_EVERY_S:
            host.log(f"switch to {release}: {text}")
            last, said_at = text, time.monotonic()
        if result.get("state") not in (None, "none", "running"):
            return _report(host, release, result)
        gevent.sleep(POLL_EVERY_S)
    host.log_styled(f"switch to {release}: still under way after {timeout_s} s", fg="red")
    return False


def _said(result: dict[str, Any]) -> str:
    """Return the last thing the switch said, without the field that repeats the phase."""
    text = result.get("progress") or result.get("reason") or "under way"
    return " ".join(word for word in str(text).split(" ") if not word.startswith("phase="))


def _report(host: Host, release: str, result: dict[str, Any]) -> bool:
    times = ", ".join(
        f"{phase} {seconds:.1f} s" for phase, seconds in (result.get("times_s") or {}).items()
    )
    if result["state"] == "switched":
        host.log(f"serves {release} ({times})")
        for line in result.get("bench") or ():
            host.log_styled(line, fg=None if line.startswith("speed: ") else "yellow")
        return True
    for line in result.get("log_tail") or ():
        host.log(f"  {line}")
    host.log_styled(
        f"{release}: {result['state']} in phase {result.get('failed_phase')}: "
        f"{result.get('reason')}\n"
        f"  now serving: {result.get('serving') or 'nothing'}\n"
        f"  fix: correct the cause above and run again; the host keeps what it serves",
        fg="red",
    )
    return False


@operation()
@host_errors
def proven(plan: ServePlan, gateway: GatewayPlan, paths: Paths) -> Generator[Any, None, None]:
    """Refuse to call the run good unless the host provably serves this release.

    Args:
        plan: the release.
        gateway: the way in, for the summary.
        paths: where the host tools are.
    """
    if not host.state.is_executing:
        host.noop("judged after the change")
        return
    status = read(Status, tools_dir=paths.tools_dir)
    if status.service(plan.service).get("stopped_by_hand"):
        host.noop(f"{plan.service} is stopped by hand; nothing to prove")
        return
    why = status.unproven(plan.service, plan.name)
    if why:
        yield refuse(
            Problem(
                f"{host.name}: {plan.name}",
                f"not proven: {why}",
                "run again; `spark-check` on the host says which check fails",
            )
        )
        return
    for line in summary(plan, gateway, status):
        host.log(line)
    host.noop("proven")


def summary(plan: ServePlan, gateway: GatewayPlan, status: HostStatus) -> list[str]:
    """Say in a few lines what a host serves and what that was proven with."""
    proof = status.proof(plan.name)
    listen = ", ".join(url for url, _ in base_urls(gateway))
    lines = [
        f"serves {plan.model} with profile {plan.profile} as {', '.join(plan.names)} at {listen}",
        f"proof: {proof.get('level')} check of {proof.get('checked_at')}, "
        f"{len(proof.get('checks') or ())} checks; one live answer in "
        f"{status.live(plan.name).get('seconds', 0):.1f} s",
    ]
    if proof.get("portable"):
        lines.append("portable mode: weights dequantised to BF16; proves no Spark kernel")
    if proof.get("stubbed"):
        lines.append(f"stubbed here: {', '.join(proof['stubbed'])}")
    return lines
