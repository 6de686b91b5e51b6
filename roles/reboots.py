"""Reboot hosts that wait for it, where settings allow that: one after the other, each proven."""

from __future__ import annotations

from pyinfra.api.deploy import deploy
from pyinfra.context import host, inventory
from spark_contract.release import Release

from spark_deploy.operations.loop import each
from spark_deploy.operations.service.reboots import rebooted
from spark_deploy.planning.types import NeedsPlan


@deploy("Reboots")
def apply(*, plan: NeedsPlan, serve: Release) -> None:
    """Come first: a host whose driver waits for a reboot would fail every later step."""
    if plan.reboot != "allow":
        return
    # One operation per host in inventory order, so that one is back and proven before the next.
    for name in each(member.name for member in inventory):
        if name == host.name:
            rebooted(name=f"Reboot {name} where it is due", needs=plan, serve=serve)
