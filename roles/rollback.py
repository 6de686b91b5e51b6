"""Go back to a release that was proven before, host by host, with the same proof as a deploy."""

from __future__ import annotations

from pyinfra.api.deploy import deploy
from pyinfra.context import host, inventory

from spark_deploy.operations.loop import each
from spark_deploy.operations.service.releases import rolled_back, still_proven


@deploy("Rollback")
def apply(*, service: str, to: str | None, timeout_s: int) -> None:
    """Serve the release before the current one, or ``to``."""
    # One operation per host in inventory order: a fault stops at the first host it meets.
    for name in each(member.name for member in inventory):
        if name == host.name:
            rolled_back(
                name=f"Go back on {name}",
                service=service,
                to=to,
                timeout_s=timeout_s,
            )
    still_proven(name="Prove what is served", service=service)
