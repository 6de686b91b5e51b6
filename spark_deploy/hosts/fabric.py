"""The network between cluster members: judge it, set it up, measure it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence

import gevent
from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host, state
from spark_contract import documents
from spark_contract.errors import problem_in
from spark_contract.fabric import (
    NETPLAN_FILE,
    NETPLAN_TRIAL,
    TRY_AGAIN,
    FabricPlan,
    SpeedFound,
    SpeedOrder,
)
from spark_contract.tool import FABRIC, FABRIC_SPEED, HOST_TOOL, line

from spark_deploy.config.errors import Problem
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts.capacity import Verdict
from spark_deploy.hosts.commands import log, log_once, run_reconnecting
from spark_deploy.hosts.facts import read_fact
from spark_deploy.hosts.host_errors import (
    Commands,
    Refused,
    host_command,
    host_errors,
    refuse,
    show,
)
from spark_deploy.hosts.network import Fabric, Netplan, NetplanFiles, Reach
from spark_deploy.hosts.survey import Survey
from spark_deploy.plan.fabric import fabric_plan, there_already
from spark_deploy.plan.machine import Way

_FULL_MBIT_PER_S = 200_000  # of one cable, told by each of the two interfaces of its cage


_LARGE_MTU = 9000


def judge_links(host: str, ways: Sequence[Way], reached: Mapping[str, str]) -> Verdict:
    """Collect what is wrong with the ways from a host to the others of its cluster."""
    problems, warnings = [], []
    for way in ways:
        where = f"{host}: {way.interface}"
        answer = reached.get(way.address, "unknown")
        if answer == "no":
            problems.append(_cut(where, way))
        if answer == "unknown":
            what = f"the way to {way.host} ({way.address}) was not tried: there is no ping here"
            warnings.append(Problem(where, what, "apt-get install iputils-ping"))
        if way.mtu != way.other_mtu:
            what = f"MTU {way.mtu}, but {way.other_mtu} on {way.host}"
            problems.append(Problem(where, what, "set the same MTU at both ends (netplan)"))
    return Verdict(tuple(problems), (*warnings, *_slow(host, ways)))


def _cut(where: str, way: Way) -> Problem:
    return Problem(
        where,
        f"no packet of {way.mtu} bytes comes back from {way.host} ({way.address})",
        "see to cable, address and MTU of both ends, and that no firewall is between members",
    )


def _slow(host: str, ways: Sequence[Way]) -> Iterator[Problem]:
    """Yield what costs speed and nothing else."""
    with_rdma = {way.interface: way for way in ways if way.device}
    for way in with_rdma.values():
        where = f"{host}: {way.interface}"
        if way.speed_mbit_per_s is not None and way.speed_mbit_per_s < _FULL_MBIT_PER_S:
            what = f"linked at {way.speed_mbit_per_s // 1000} Gb/s of 200"
            fix = "use a cable for 200 Gb/s; behind a switch set the speed of its port"
            yield Problem(where, what, fix)
        if way.mtu < _LARGE_MTU:
            what = f"MTU {way.mtu}: RDMA moves small packets, reported to cost much of prefill"
            yield Problem(where, what, f"set MTU {_LARGE_MTU} at both ends (netplan)")
    if len(with_rdma) == 1:
        what = "one of the two interfaces of the cage has an address: half of the cable's speed"
        fix = "give its twin one in a network of its own (netplan)"
        yield Problem(f"{host}: {next(iter(with_rdma))}", what, fix)


# Below this share of what a link says something is wrong with it. What TCP and python can show at
# most is not known of a Spark: so above the second figure a way is never called slow.
_LEAST_SHARE = 0.25


_LEAST_GBIT_PER_S = 10.0


_DOUBTFUL_GBIT_PER_S = 25.0  # of 200: a ConnectX-7 that came up degraded is reported to carry 13


def describe_speed(way: Way, found: SpeedFound) -> str:
    """Return what was measured of a way, beside what its link says."""
    link = f"{way.speed_mbit_per_s / 1000:g} Gb/s" if way.speed_mbit_per_s else "of unknown speed"
    return (
        f"{way.interface} to {way.host} ({way.address}): {_gbit_per_s(found):.1f} Gb/s over TCP "
        f"({found.arrived_bytes / 1e6:.0f} MB in {found.took_s:.2f} s; link {link})"
    )


def judge_speed(host: str, way: Way, found: SpeedFound) -> Verdict:
    """Collect what a short test over TCP can say against a way; how fast RDMA is it cannot."""
    where, carried = f"{host}: {way.interface}", _gbit_per_s(found)
    stated = (way.speed_mbit_per_s or 0) / 1000
    if not found.arrived_bytes:
        what = f"the connection opens, but nothing of full size gets to {way.host}"
        fix = f"set MTU {way.mtu} at both ends, and at the switch between them"
        return Verdict((Problem(where, what, fix),), ())
    if carried < min(_LEAST_SHARE * stated, _LEAST_GBIT_PER_S):
        what = f"{carried:.1f} Gb/s to {way.host} over a link that says {stated:g}"
        fix = "try another cable, see `ethtool -S` for errors and `ip route get` for the way taken"
        return Verdict((Problem(where, what, fix),), ())
    if carried < _DOUBTFUL_GBIT_PER_S and stated * 1000 >= _FULL_MBIT_PER_S:
        what = f"{carried:.1f} Gb/s to {way.host}: a port that came up degraded is reported to"
        what += " carry 13 and still to say 200"
        fix = "measure RDMA with ib_write_bw; about 92 are usual for each of the two interfaces"
        return Verdict((), (Problem(where, what, fix),))
    return Verdict((), ())


def _gbit_per_s(found: SpeedFound) -> float:
    return found.arrived_bytes * 8 / 1e9 / max(found.took_s, 1e-6)


def find_differences(members: Sequence[str], surveys: Mapping[str, Survey]) -> Iterator[Problem]:
    """Yield what members of a cluster must not differ in, and kernels that no cluster runs on."""
    seen = {name: surveys[name] for name in members if name in surveys}
    branches = {name: one.gpu.driver_version.partition(".")[0] for name, one in seen.items()}
    if len(set(branches.values())) > 1:
        named = ", ".join(f"{name} {branch or 'none'}" for name, branch in branches.items())
        fix = "bring all members to one branch, by the vendor's means"
        yield Problem("driver", f"of different branches: {named}", fix)
    for name, one in seen.items():
        if one.memory.cma_free_bytes > one.memory.cma_total_bytes:
            yield Problem(
                f"{name}: kernel",
                f"{one.identity.kernel} keeps memory for its handover (CmaFree is above CmaTotal); "
                "NCCL is reported to find none to start with",
                "boot with kho=off, or with a 6.17 kernel",
            )


@operation()
@host_errors
def set_up_ports(settings: Settings, check: FunctionCommand | None) -> Commands:
    """Have an address on each cabled port; a network that is there is taken as it is.

    ``check`` logs in anew, the way deploys do, once the host has applied it all; the new network
    is kept when that worked.
    """
    state, found = read_fact(NetplanFiles), read_fact(Fabric, _sudo=False)
    if state.tried:
        refuse(f"{host.name}: {NETPLAN_TRIAL}", "another try is under way", TRY_AGAIN)
    there = there_already(host.name, settings, found)
    if there and not state.ours:
        host.noop(f"a network is there and taken as it is: {there}")
        return
    plan = fabric_plan(host.name, settings, found)
    if state.ours == plan.netplan and there:
        host.noop(f"{NETPLAN_FILE} says so, and it is so: {there}")
        return
    _check_ports_free(plan, state)
    log_once(f"{NETPLAN_FILE}, tried for {plan.confirm_s} s:\n{plan.netplan}")
    yield StringCommand(HOST_TOOL, FABRIC, "try", _stdin=documents.text_of(plan))
    back = f"the old network returns in {plan.confirm_s} s"
    yield FunctionCommand(_run_step, ["settled", back], {})
    if check is not None:
        yield check
    yield FunctionCommand(_run_step, ["confirm", back], {})


@operation()
@host_errors
def restore_network() -> Commands:
    """Have nothing of ours in netplan; what was before us holds again."""
    if not read_fact(NetplanFiles).ours:
        host.noop("nothing was set up by us")
        return
    yield FunctionCommand(_run_step, ["restore", "look at `netplan apply` on the host"], {})


def _check_ports_free(plan: FabricPlan, state: Netplan) -> None:
    """Refuse ports that others say something about, and a second set-up over a first."""
    if not state.there:
        refuse(
            host.name, "there is no netplan here", "give the ports addresses by the host's means"
        )
    if state.ours and state.ours != plan.netplan:
        fix = "spark-deploy fabric --restore, while no cluster serves, and then again"
        refuse(f"{host.name}: {NETPLAN_FILE}", "says something else", fix)
    problems = []
    for port in plan.ports:
        where = f"{host.name}: {port.interface}"
        if carrier := state.below.get(port.interface):
            what = f"is part of {carrier}"
            problems.append(Problem(where, what, "name another port by fabric.interfaces"))
        if file := state.named.get(port.interface):
            fix = "set the address there, or remove the port from that file"
            problems.append(Problem(where, f"{file} configures this port", fix))
    if problems:
        raise Refused(*problems)


@host_command
def _run_step(state: State, host: Host, order: str, fix: str) -> bool:
    done, said, wrong = run_reconnecting(host, line(FABRIC, order))
    if not done:
        lines = (wrong or said).strip().splitlines() or [f"fabric {order} failed"]
        raise Refused(problem_in(lines[-1]) or Problem(host.name, lines[-1], fix))
    return True


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
def measure_links(ways: Sequence[Way]) -> None:
    """Try packets of full size on each way, then measure it; of the hosts nothing is changed."""
    if not state.is_executing:
        for way in ways:
            most = f"{MOST_BYTES // 10**6} MB and {MOST_S} s at most"
            log_once(f"{way.interface} to {way.host} ({way.address}): {most}")
        host.noop("measured when it runs")
        return
    asked = tuple((way.interface, way.address, way.mtu) for way in ways)
    reached: dict[str, str] = read_fact(Reach, _sudo=False, ways=asked)
    _show_verdict(judge_links(host.name, ways, reached))
    for way in ways:
        found = _measure(way)
        log(describe_speed(way, found))
        _show_verdict(judge_speed(host.name, way, found))
    host.noop("measured")


def _show_verdict(verdict: Verdict) -> None:
    for warning in verdict.warnings:
        show(host, f"warning: {warning}", colour="yellow")
    if verdict.problems:
        raise Refused(*verdict.problems)


def _measure(way: Way) -> SpeedFound:
    order = SpeedOrder(
        interface=way.interface,
        address=way.address,
        port=secrets.choice(_PORTS),
        token=secrets.token_hex(16),
        most_bytes=MOST_BYTES,
        most_s=MOST_S,
    )
    other = state.inventory.get_host(way.host)
    listening = gevent.spawn(_run_test, other, _LISTEN, order)
    try:
        sent, said = _run_test(host, line(FABRIC_SPEED, "send"), order)
        heard, why = listening.get(timeout=_COMMAND_S)
    finally:
        listening.kill()
    wrong = [
        _explain(name, text)
        for name, good, text in ((host.name, sent, said), (way.host, heard, why))
        if not good
    ]
    if wrong:
        raise Refused(*wrong)
    return documents.parse(SpeedFound, said)


def _run_test(host: Host, script: str, order: SpeedOrder) -> tuple[bool, str]:
    done, output = host.run_shell_command(
        StringCommand(script),
        _sudo=host.data.get("_sudo", False),
        _timeout=_COMMAND_S,
        _stdin=documents.text_of(order),
    )
    return done, output.stdout if done else output.stderr or output.stdout


def _explain(name: str, said: str) -> Problem:
    lines = said.strip().splitlines() or ["the test did not run"]
    told = (problem_in(one) for one in reversed(lines))
    fix = "see `journalctl -xe` there, then run it again"
    return next(filter(None, told), Problem(name, lines[-1], fix))
