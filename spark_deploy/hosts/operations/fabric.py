"""Give the ports between hosts their addresses: tried, confirmed by a new login, or taken back."""

from __future__ import annotations

from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host
from spark_contract import documents
from spark_contract.errors import problem_in
from spark_contract.fabric import NETPLAN_FILE, NETPLAN_TRIAL, TRY_AGAIN, FabricPlan
from spark_contract.tool import FABRIC, HOST_TOOL, line

from spark_deploy.config.errors import Problem
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts.facts.fact_cache import read
from spark_deploy.hosts.facts.network import Fabric, Netplan, NetplanFiles
from spark_deploy.hosts.operations.commands import log_once
from spark_deploy.hosts.operations.host_errors import (
    Commands,
    Refused,
    host_command,
    host_errors,
    refuse,
)
from spark_deploy.hosts.operations.reconnect import run_reconnecting
from spark_deploy.plan.fabric import fabric_plan, there_already


@operation()
@host_errors
def set_up(settings: Settings, check: FunctionCommand | None) -> Commands:
    """Have an address on each cabled port; a network that is there is taken as it is.

    ``check`` logs in anew, the way deploys do, once the host has applied it all; the new network
    is kept when that worked.
    """
    state, found = read(NetplanFiles), read(Fabric, _sudo=False)
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
    _must_be_free(plan, state)
    log_once(f"{NETPLAN_FILE}, tried for {plan.confirm_s} s:\n{plan.netplan}")
    yield StringCommand(HOST_TOOL, FABRIC, "try", _stdin=documents.text_of(plan))
    back = f"the old network returns in {plan.confirm_s} s"
    yield FunctionCommand(_ran, ["settled", back], {})
    if check is not None:
        yield check
    yield FunctionCommand(_ran, ["confirm", back], {})


@operation()
@host_errors
def restored() -> Commands:
    """Have nothing of ours in netplan; what was before us holds again."""
    if not read(NetplanFiles).ours:
        host.noop("nothing was set up by us")
        return
    yield FunctionCommand(_ran, ["restore", "look at `netplan apply` on the host"], {})


def _must_be_free(plan: FabricPlan, state: Netplan) -> None:
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
def _ran(state: State, host: Host, order: str, fix: str) -> bool:
    done, said, wrong = run_reconnecting(host, line(FABRIC, order))
    if not done:
        lines = (wrong or said).strip().splitlines() or [f"fabric {order} failed"]
        raise Refused(problem_in(lines[-1]) or Problem(host.name, lines[-1], fix))
    return True
