"""Take this project off a host."""

from __future__ import annotations

from pyinfra.api.deploy import deploy

from spark_deploy.hosts.uninstall import uninstall


@deploy("Uninstall")
def apply(*, request: str) -> None:
    """Remove what is ours, and say what stays."""
    uninstall(name="Remove what is ours", request=request)
