"""What a deploy put on this host: releases and gateways, read from where they lie."""

from __future__ import annotations

import os
from pathlib import Path

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.gateway import Gateway
from spark_contract.paths import Paths
from spark_contract.release import Release, service_of
from spark_contract.units import RELEASE_NAME


def default_paths() -> Paths:
    """Return the paths below ``SPARK_ROOT``, or below ``/``: tests run the real code elsewhere."""
    return Paths(Path(os.environ.get("SPARK_ROOT", "/")))


def gateway_of(service: str, paths: Paths) -> Gateway:
    """Return the settings of a service's gateway.

    Raises:
        HostToolError: They are absent or malformed.
    """
    return files.load(Gateway, paths.gateway_settings(service), "no settings of the gateway")


def names(paths: Paths) -> list[str]:
    """Return the names of all releases on this host."""
    if not paths.releases.is_dir():
        return []
    found = (entry for entry in paths.releases.iterdir() if paths.release(entry.name).is_file())
    return sorted(entry.name for entry in found if RELEASE_NAME.match(entry.name))


def load(name: str, paths: Paths) -> Release:
    """Return the release ``name``.

    Raises:
        HostToolError: The release is absent, malformed, or carries another name.
    """
    service_of(name)
    path = paths.release(name)
    release = files.load(Release, path, "no such release")
    if release.name != name:
        raise HostToolError(
            str(path), f"carries the name {release.name!r}", "run the deploy again", 2
        )
    return release
