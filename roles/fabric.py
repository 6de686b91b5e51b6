"""Set up the network between hosts, or take it back."""

from __future__ import annotations

from pyinfra.api.command import FunctionCommand
from pyinfra.api.deploy import deploy

from spark_deploy.operations.machine import fabric
from spark_deploy.settings.types import Settings


@deploy("Fabric")
def apply(*, settings: Settings, check: FunctionCommand | None) -> None:
    """Give the cabled ports their addresses."""
    fabric.set_up(name="Set up the ports between hosts", settings=settings, check=check)


@deploy("Fabric")
def restore() -> None:
    """Take them back."""
    fabric.restored(name="Take back the network between hosts")
