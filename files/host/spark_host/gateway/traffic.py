"""The traffic of a service: while its file exists, the gateway lets requests through.

It lies on a tmpfs, so a boot starts closed, and closing it leaves running answers alone.
"""

from __future__ import annotations

import grp
import os

from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_contract.tool import MAKE_USERS

from spark_host.system import folders, stored


def is_open(service: str, paths: Paths) -> bool:
    """Return whether requests pass."""
    return paths.traffic(service).exists()


def close(service: str, paths: Paths) -> None:
    """Let no new request pass."""
    if paths.service_run(service).is_dir():
        files.remove(paths.traffic(service))


def open_for(release: Release, paths: Paths) -> None:
    """Let requests pass to this release's engine."""
    service = release.service
    make_folder(service, paths)
    # vLLM makes the socket with the umask of its container: only root may connect.
    with folders.held_socket(paths.engine_socket(service)) as socket:
        os.chown(socket, 0, group_id(service, paths))
        os.chmod(socket, 0o660)
    # The gateway reads the names there: an older release may answer to other ones.
    told = "".join(f"{line}\n" for line in (release.name, *release.names))
    files.write_text(paths.traffic(service), told)


def make_folder(service: str, paths: Paths) -> None:
    """Have the folder of what opens traffic: of root, the gateway may only look for a name.

    The engine that runs may have owned it until now.
    """
    paths.run.mkdir(mode=0o755, parents=True, exist_ok=True)
    folders.give(paths.service_run(service), 0, group_id(service, paths), 0o710)


def group_id(service: str, paths: Paths) -> int:
    """Return the number of the gateway's group.

    Raises:
        HostToolError: The group is missing.
    """
    user = stored.gateway_of(service, paths).user
    try:
        return grp.getgrnam(_group_of(user)).gr_gid
    except KeyError as error:
        raise HostToolError(
            f"group of {user}",
            "does not exist on this host",
            f"{MAKE_USERS}, or run the deploy again",
        ) from error


def _group_of(user: str) -> str:
    # Debian's "nobody" has the group "nogroup"; ours carries its own name.
    return "nogroup" if user == "nobody" else user
