"""Replace the API key of a service."""

from __future__ import annotations

from pyinfra.api.deploy import deploy

from spark_deploy.operations.service import gateway
from spark_deploy.planning.types import GatewayPlan


@deploy("Rotate key")
def apply(*, plan: GatewayPlan) -> None:
    """Have a new key in use; clients get it with `spark-deploy connect`."""
    gateway.new_key(name="Replace the API key", plan=plan)
