"""Refuse a host that does not fit, with all problems at once, before anything is changed on it."""

from pyinfra.api import deploy

from spark_deploy.hosts import preflight
from spark_deploy.plan.types import NeedsPlan


@deploy("Preflight")
def apply(*, plan: NeedsPlan) -> None:
    """Check identity, health, other workloads and room; stop only containers named in settings."""
    preflight.check_host(name="Check that the host fits", needs=plan)
    preflight.check_cluster(name="Check that its cluster fits", needs=plan)
    preflight.take_over(name="Take over containers", needs=plan)
