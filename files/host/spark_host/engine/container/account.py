"""The account of the engine: in its container it is not root, here it owns what it writes."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from spark_contract.errors import HostToolError
from spark_contract.release import Release
from spark_contract.tool import MAKE_USERS

from spark_host.system import folders


def docker_arguments(release: Release) -> list[str]:
    """Return what has ``docker run`` start the engine as its account, by number.

    The image does not know the name, and its own accounts may have this host's numbers.

    Raises:
        HostToolError: The account is missing.
    """
    owner = _owner(release)
    return ["--user", f"{owner.pw_uid}:{owner.pw_gid}"]


def number(release: Release) -> int:
    """Return the account's user id on this host.

    Raises:
        HostToolError: The account is missing.
    """
    return _owner(release).pw_uid


def make_folder(folder: Path, release: Release) -> None:
    """Make a folder of the engine's own; its parent has to be root's."""
    owner = _owner(release)
    folders.give(folder, owner.pw_uid, owner.pw_gid, 0o755)


def tree_problem(release: Release) -> HostToolError | None:
    """Return the first file of the trees that the engine's account could not read."""
    for place, _, names in (found for tree in release.trees for found in os.walk(tree.path)):
        for path in (Path(place), *(Path(place) / name for name in names)):
            needed = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
            if path.stat().st_mode & needed != needed:
                return HostToolError(
                    str(path),
                    f"cannot be read by {release.engine.user}, as whom the engine runs",
                    f"chmod o+rX {path}, then deploy again",
                )
    return None


def _owner(release: Release) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(release.engine.user)
    except KeyError as error:
        raise HostToolError(
            f"account {release.engine.user}",
            "does not exist on this host",
            f"{MAKE_USERS}, or run the deploy again",
        ) from error
