"""Take back what bootstrap granted on a host."""

from __future__ import annotations

from pyinfra.api.command import FunctionCommand
from pyinfra.api.deploy import deploy

from spark_deploy.hosts import access
from spark_deploy.plan.machine import BootstrapPlan


@deploy("Unbootstrap")
def apply(*, plan: BootstrapPlan, check: FunctionCommand) -> None:
    """Remove account, rule and key, and prove by a new login that it is refused."""
    access.revoke_access(name="Remove account, rule and key", plan=plan, check=check)
