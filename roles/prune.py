"""Free the disk of what no kept release needs."""

from __future__ import annotations

from pyinfra.api.deploy import deploy
from spark_contract.keep import Keep

from spark_deploy.operations.service.releases import pruned


@deploy("Prune")
def apply(*, keep: Keep) -> None:
    """Remove what ``keep`` and the releases it counts do not need."""
    pruned(name="Remove what nothing kept needs", keep=keep)
