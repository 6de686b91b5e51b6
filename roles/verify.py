"""Close the run: red unless the host provably serves what was planned."""

from __future__ import annotations

from pyinfra.api.deploy import deploy
from spark_contract.release import Release

from spark_deploy.operations.service.serve import proven
from spark_deploy.planning.types import GatewayPlan


@deploy("Verify")
def apply(*, plan: Release, gateway: GatewayPlan) -> None:
    """Compare what runs, what is proven and one live answer with the plan."""
    proven(name="Prove what is served", plan=plan, gateway=gateway)
