"""Check that a host meets the plan's requirements, and report all problems at once."""

from pyinfra.api import deploy

from spark_deploy.hosts import preflight
from spark_deploy.plan.types import PreflightPlan


@deploy("Preflight")
def apply(*, plan: PreflightPlan) -> None:
    preflight.check_host(name="Check that the host fits", plan=plan)
    preflight.check_cluster(name="Check that its cluster fits", plan=plan)
    preflight.take_over(name="Take over containers", plan=plan)
