"""The account of the engine: in its container it is not root, here it owns what it writes."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from spark_contract.errors import HostToolError
from spark_contract.host.tool import MAKE_USERS
from spark_contract.serving.release import Release

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


def give_all(folder: Path, release: Release) -> None:
    """Have the engine own a folder of its cache with all in it.

    Root's files go to the engine's account. Files of any other account are removed: a compile
    cache is code, and this engine would run it.
    The folder itself comes last: while it belongs to another, the rest is looked at again.
    """
    owner = _owner(release)
    trusted = (0, owner.pw_uid)
    if folder.stat().st_uid not in trusted:
        folders.empty(folder)
    # By descriptors: whose folder it was may put a link in the place of one that is walked.
    for _, below, names, place in os.fwalk(folder, topdown=False):
        for name in (*below, *names):
            if os.stat(name, dir_fd=place, follow_symlinks=False).st_uid not in trusted:
                folders.remove(name, place)
    if folder.stat().st_uid == owner.pw_uid:
        return
    for _, _, names, place in os.fwalk(folder, topdown=False):
        for name in names:
            os.chown(name, owner.pw_uid, owner.pw_gid, dir_fd=place, follow_symlinks=False)
        os.fchown(place, owner.pw_uid, owner.pw_gid)


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
