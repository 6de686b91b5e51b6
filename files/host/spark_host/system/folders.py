"""Folders that belong to an account which is not root: root follows nothing that lies in them.

A name in such a folder may lead anywhere by the time it is used. So what is there is opened without
following links, looked at, and only then changed through that very descriptor.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_contract.errors import HostToolError

_LIMIT_S = 600.0  # of coreutils, which copy and remove trees that engines may have made too deep


def give(path: Path, owner: int, group: int, mode: int) -> None:
    """Have a folder at ``path`` with this owner, group and mode; its parent has to be root's.

    Raises:
        HostToolError: Something else has its name.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError as error:
        raise HostToolError(
            str(path), "is not a folder", f"remove it: rm {path}; then run the deploy again"
        ) from error
    try:
        os.fchown(descriptor, owner, group)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def empty(path: Path) -> None:
    """Remove all that lies in a folder, links themselves and not what they lead to."""
    if not path.is_dir():
        return
    with _opened(path) as folder:
        for name in os.listdir(folder):
            remove(name, folder)


def remove_tree(path: Path) -> bool:
    """Remove a tree of any depth and return whether it is gone; no link in it is followed."""
    return _run("rm", "-rf", "--one-file-system", "--", str(path))


def copy_tree(source: Path, target: Path) -> bool:
    """Copy a tree to a new place and return whether it is whole; links are copied as links."""
    options = ("-a", "--reflink=auto", "--one-file-system", "--")
    return _run("cp", *options, str(source), str(target))


def _run(*argv: str) -> bool:
    null = subprocess.DEVNULL  # an error for each of a million files is no output to keep
    try:
        done = subprocess.run(
            argv, stdin=null, stdout=null, stderr=null, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def remove(name: str, folder: int) -> None:
    """Remove what has a name in an open folder, a link itself and not what it leads to."""
    if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
        shutil.rmtree(f"/proc/self/fd/{folder}/{name}")  # Python 3.10 has no dir_fd here
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def measure(folder: Path, most_bytes: int, most_files: int) -> tuple[int, int]:
    """Return bytes and files of a folder, up to where they exceed a limit; it may be anybody's."""
    size = count = 0
    todo = [os.fspath(folder)]
    while todo and size <= most_bytes and count <= most_files:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                count += 1
                size += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                if count > most_files:
                    break
    return size, count


def is_socket(path: Path) -> bool:
    """Return whether a socket lies there; a link to one does not count."""
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def held_socket(path: Path) -> Iterator[str]:
    """Hold the socket at ``path`` and give a name that leads to it and to nothing else.

    Raises:
        FileNotFoundError: Nothing is there.
        HostToolError: It is no socket.
    """
    with _opened(path.parent) as folder:
        descriptor = os.open(path.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise HostToolError(
                str(path), "is no socket, the engine put something else there", "restart the engine"
            )
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
