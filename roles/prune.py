"""Free the disk of what no kept release needs."""

from __future__ import annotations

from typing import Any

from pyinfra.api.deploy import deploy

from spark_deploy.operations.service.releases import pruned
from spark_deploy.planning.types import Paths


@deploy("Prune")
def apply(*, keep: dict[str, Any], paths: Paths) -> None:
    """Remove what ``keep`` and the releases it counts do not need."""
    pruned(name="Remove what nothing kept needs", keep=keep, paths=paths)
