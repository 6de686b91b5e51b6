"""The traffic file of a service: while it exists, the gateway forwards requests.

It is on a tmpfs, so traffic is closed after a boot. Closing does not interrupt in-flight requests.
"""

from __future__ import annotations

import grp
import os

from spark_contract import files
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_contract.tool import MAKE_USERS, HostToolError

from spark_host.system import folders
from spark_host.system.host import load_gateway


def is_open(service: str, paths: Paths) -> bool:
    return paths.traffic(service).exists()


def close(service: str, paths: Paths) -> None:
    if paths.service_run(service).is_dir():
        files.remove(paths.traffic(service))


def open_for(release: Release, paths: Paths) -> None:
    service = release.service
    make_folder(service, paths)
    # vLLM creates the socket only for its account.
    with folders.opened_socket(paths.engine_socket(service)) as socket:
        os.chown(socket, 0, group_id(service, paths))
        os.chmod(socket, 0o660)
    # The gateway reads the names, because an older release may serve other names.
    lines = "".join(f"{line}\n" for line in (release.name, *release.names))
    files.write_text(paths.traffic(service), lines)


def make_folder(service: str, paths: Paths) -> None:
    paths.run.mkdir(mode=0o755, parents=True, exist_ok=True)
    folders.create(paths.service_run(service), 0, group_id(service, paths), 0o710)


def group_name(user: str) -> str:
    # Debian's "nobody" is in the group "nogroup".
    return "nogroup" if user == "nobody" else user


def group_id(service: str, paths: Paths) -> int:
    user = load_gateway(service, paths).user
    try:
        return grp.getgrnam(group_name(user)).gr_gid
    except KeyError as error:
        fix = f"{MAKE_USERS}, or run the deploy again"
        raise HostToolError(f"group of {user}", "does not exist on this host", fix) from error
