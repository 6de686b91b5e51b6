"""Changes folders of other accounts.

The owner may replace entries at any time, so root opens them without following links, and
changes them by descriptor.
"""

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_contract.tool import HostToolError

_COMMAND_TIMEOUT_S = 600.0


def create(path: Path, owner: int, group: int, mode: int) -> None:
    """Create a folder with owner, group and mode; root must own the parent."""
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        with _opened(path) as descriptor:
            os.fchown(descriptor, owner, group)
            os.fchmod(descriptor, mode)
    except NotADirectoryError as error:
        fix = f"run `rm {path}`, then deploy again"
        raise HostToolError(str(path), "is not a folder", fix) from error


def remove_entries(path: Path) -> None:
    """Remove the entries of a folder, but not the targets of links."""
    if not path.is_dir():
        return
    with _opened(path) as folder:
        opened_path = f"/proc/{os.getpid()}/fd/{folder}/"
        _run("find", opened_path, "-mindepth", "1", "-maxdepth", "1",
             "-exec", "rm", "-rf", "--one-file-system", "--", "{}", "+")  # fmt: skip
        if remaining := os.listdir(folder):
            entry = path / remaining[0]
            fix = f"run `rm -rf {entry}` to see the error, then start the service again"
            raise HostToolError(str(entry), "cannot be removed", fix)


def remove_tree(path: Path) -> bool:
    """Remove a folder of any depth; return whether it is gone."""
    return _run("rm", "-rf", "--one-file-system", "--", str(path))


def copy_tree(source: Path, target: Path) -> bool:
    options = ("-a", "--reflink=auto", "--one-file-system", "--")
    return _run("cp", *options, str(source), str(target))


def _run(*argv: str) -> bool:
    null = subprocess.DEVNULL  # coreutils may print an error for each of a million files
    try:
        result = subprocess.run(
            argv, stdin=null, stdout=null, stderr=null, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return result.returncode == 0


def measure(folder: Path, max_bytes: int, max_files: int) -> tuple[int, int]:
    """Return a folder's size in bytes and its file count; stop once either limit is exceeded.

    Files whose paths are longer than PATH_MAX cannot be counted, so a folder that contains such a
    file counts as larger than ``max_bytes``.
    """
    size = count = 0
    pending = [os.fspath(folder)]
    while pending and size <= max_bytes and count <= max_files:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    count += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    if count > max_files:
                        break
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return max_bytes + 1, count
    return size, count


@contextmanager
def opened_socket(path: Path) -> Iterator[str]:
    """Yield a path that always leads to this socket; raise HostToolError for other files."""
    with _opened(path.parent) as folder:
        descriptor = os.open(path.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            message = "is not a socket: the engine replaced it"
            raise HostToolError(str(path), message, "restart the engine")
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
