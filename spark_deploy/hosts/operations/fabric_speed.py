"""Send a little over each cabled port to the next host, and say what that tells of the way."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import gevent
from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.context import host, state
from spark_contract import documents
from spark_contract.errors import problem_in
from spark_contract.fabric import SpeedFound, SpeedOrder
from spark_contract.tool import FABRIC_SPEED, line

from spark_deploy.config.errors import Problem
from spark_deploy.hosts.facts.fact_cache import read
from spark_deploy.hosts.facts.network import Reach
from spark_deploy.hosts.operations.commands import log, log_once
from spark_deploy.hosts.operations.host_errors import Refused, host_errors, show
from spark_deploy.hosts.preflight.fabric import judge_speed, judge_ways, told_of
from spark_deploy.hosts.preflight.verdict import Verdict
from spark_deploy.plan.machine import Way

# Each rail is measured from both ends: 2 GB and 5 s of it in all.
MOST_BYTES = 10**9
MOST_S = 2.5
_COMMAND_S = 40
_PORTS = range(20000, 29000)  # below those that a kernel gives away by itself

_LIMITS = {
    "DynamicUser": "yes", "CapabilityBoundingSet": "", "NoNewPrivileges": "yes",
    "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateDevices": "yes",
    "RestrictAddressFamilies": "AF_INET", "MemoryMax": "256M", "RuntimeMaxSec": str(_COMMAND_S),
}  # fmt: skip
# As an account that exists for the test alone; systemd ends it should it not end by itself.
_LISTEN = " ".join(
    [
        "systemd-run --quiet --collect --wait --pipe",
        *(f"--property={name}={value}" for name, value in _LIMITS.items()),
        line(FABRIC_SPEED, "listen"),
    ]
)


@operation()
@host_errors
def measured(ways: Sequence[Way]) -> None:
    """Try packets of full size on each way, then measure it; of the hosts nothing is changed."""
    if not state.is_executing:
        for way in ways:
            most = f"{MOST_BYTES // 10**6} MB and {MOST_S} s at most"
            log_once(f"{way.interface} to {way.host} ({way.address}): {most}")
        host.noop("measured when it runs")
        return
    asked = tuple((way.interface, way.address, way.mtu) for way in ways)
    reached: dict[str, str] = read(Reach, _sudo=False, ways=asked)
    _judged(judge_ways(host.name, ways, reached))
    for way in ways:
        found = _measured(way)
        log(told_of(way, found))
        _judged(judge_speed(host.name, way, found))
    host.noop("measured")


def _judged(verdict: Verdict) -> None:
    for warning in verdict.warnings:
        show(host, f"warning: {warning}", colour="yellow")
    if verdict.problems:
        raise Refused(*verdict.problems)


def _measured(way: Way) -> SpeedFound:
    order = SpeedOrder(
        interface=way.interface,
        address=way.address,
        port=secrets.choice(_PORTS),
        token=secrets.token_hex(16),
        most_bytes=MOST_BYTES,
        most_s=MOST_S,
    )
    other = state.inventory.get_host(way.host)
    listening = gevent.spawn(_said, other, _LISTEN, order)
    try:
        sent, said = _said(host, line(FABRIC_SPEED, "send"), order)
        heard, why = listening.get(timeout=_COMMAND_S)
    finally:
        listening.kill()
    wrong = [
        _problem(name, text)
        for name, good, text in ((host.name, sent, said), (way.host, heard, why))
        if not good
    ]
    if wrong:
        raise Refused(*wrong)
    return documents.parse(SpeedFound, said)


def _said(host: Host, script: str, order: SpeedOrder) -> tuple[bool, str]:
    done, output = host.run_shell_command(
        StringCommand(script),
        _sudo=host.data.get("_sudo", False),
        _timeout=_COMMAND_S,
        _stdin=documents.text_of(order),
    )
    return done, output.stdout if done else output.stderr or output.stdout


def _problem(name: str, said: str) -> Problem:
    lines = said.strip().splitlines() or ["the test did not run"]
    told = (problem_in(one) for one in reversed(lines))
    fix = "see `journalctl -xe` there, then run it again"
    return next(filter(None, told), Problem(name, lines[-1], fix))
