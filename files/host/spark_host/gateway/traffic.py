"""The traffic of a service: while its file exists, the gateway lets requests through.

It lies on a tmpfs, so a boot starts closed, and closing it leaves running answers alone.
"""

from __future__ import annotations

import grp
import os
from pathlib import Path

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import Release

from spark_host.system import stored


def is_open(service: str, paths: Paths) -> bool:
    """Return whether requests pass."""
    return paths.traffic(service).exists()


def close(service: str, paths: Paths) -> None:
    """Let no new request pass."""
    if paths.service_run(service).is_dir():
        files.remove(paths.traffic(service))


def open_for(release: Release, paths: Paths) -> None:
    """Let requests pass to this release's engine."""
    # vLLM makes the socket with the umask of its container: only root may connect.
    give_to_gateway(paths.engine_socket(release.service), release, 0o660, paths)
    files.write_text(paths.traffic(release.service), f"{release.name}\n")


def give_to_gateway(path: Path, release: Release, mode: int, paths: Paths) -> None:
    """Let the gateway's group use ``path``.

    Raises:
        HostToolError: The group is missing.
    """
    user = stored.gateway_of(release.service, paths).user
    try:
        group = grp.getgrnam(_group_of(user)).gr_gid
    except KeyError as error:
        raise HostToolError(
            f"group of {user}",
            "does not exist on this host",
            "systemd-sysusers /etc/sysusers.d/spark.conf, or run the deploy again",
        ) from error
    os.chown(path, 0, group)
    os.chmod(path, mode)


def _group_of(user: str) -> str:
    # Debian's "nobody" has the group "nogroup"; ours carries its own name.
    return "nogroup" if user == "nobody" else user
