"""Set up the network between hosts, measure it, or take it back."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.command import FunctionCommand
from pyinfra.api.deploy import deploy

from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts import fabric
from spark_deploy.plan.machine import Way


@deploy("Fabric")
def apply(*, settings: Settings, check: FunctionCommand | None) -> None:
    """Give the cabled ports their addresses."""
    fabric.set_up_ports(name="Set up the ports between hosts", settings=settings, check=check)


@deploy("Fabric")
def measure(*, ways: Sequence[Way]) -> None:
    """Measure the cabled ports, one host after the other: they share the cables."""
    fabric.measure_links(name="Measure the ways to the next host", ways=ways, _serial=True)


@deploy("Fabric")
def restore() -> None:
    """Take them back."""
    fabric.restore_network(name="Take back the network between hosts")
