"""What an inventory file found out about a host; it travels in pyinfra's data of that host.

The inventory file and the deploy run in one process, one after the other, and share nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pyinfra.api.host import Host

from spark_deploy.catalog.types import Catalog
from spark_deploy.errors import SettingsError
from spark_deploy.settings.load import HostSettings

KEY = "spark_deploy"


@dataclass(frozen=True, slots=True)
class Known:
    """The settings of one host and the catalog they were checked with."""

    found: HostSettings
    catalog: Catalog

    def to_json(self) -> dict[str, str]:
        """Say for ``debug-inventory`` where the settings come from."""
        return {"group": self.found.group, "folder": str(Path(self.found.root))}


def known_of(host: Host) -> Known:
    """Return what an inventory file of ours knows of ``host``.

    Raises:
        SettingsError: no inventory file of ours named it.
    """
    known = host.data.get(KEY)
    if not isinstance(known, Known):
        fix = (
            "run with an inventory file, such as inventory/spark.py; for this machine list '@local'"
        )
        raise SettingsError.one(host.name, "no inventory file of ours named this host", fix)
    return known
