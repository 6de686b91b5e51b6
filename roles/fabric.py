"""Set up or measure the network between hosts, or restore the earlier network."""

from collections.abc import Sequence

from pyinfra.api import FunctionCommand, deploy

from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts import fabric
from spark_deploy.plan.types import FabricLink


@deploy("Fabric")
def apply(*, settings: Settings, check: FunctionCommand | None) -> None:
    fabric.set_up_ports(name="Set up the ports between hosts", settings=settings, check=check)


@deploy("Fabric")
def measure(*, links: Sequence[FabricLink]) -> None:
    """Measure hosts in sequence, because they share the cables."""
    fabric.measure_links(name="Measure the links to the next host", links=links, _serial=True)


@deploy("Fabric")
def restore() -> None:
    fabric.restore_network(name="Restore the earlier network")
