"""The filesystem rules of a tree: one rename, one builder at a time, room beforehand."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from spark_contract.files import named, sync_directory, write_pieces

from spark_checkpoint.errors import GateRefused, TransferFailed

# Small enough to stay in a core's cache between reading, hashing and writing.
COPY_BYTES = 256 << 10
_LET_GO_BYTES = 8 << 20
# Threads that hash, copy or quantise side by side; more of them wait for memory or the disk.
WORKERS = min(4, os.cpu_count() or 1)
_JSON_WORDS = 4096
# Room kept beyond the bytes known to be needed: directories, headers, filesystem blocks.
_RESERVE_FRACTION = 0.05
# Of a rename: something else has the name. Other failures have remedies of their own.
_NAME_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})


class Stamp(NamedTuple):
    """What changes when somebody touches a file's content."""

    inode: int
    size_bytes: int
    modified_ns: int


def stamp_of(file: int | Path) -> Stamp:
    """Return the stamp of a file that is open, or by name."""
    status = os.stat(file)
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def write_json(path: Path, document: Mapping[str, Any]) -> str:
    """Write JSON as people and diffs like it, durably, and return its sha256.

    Piece by piece: an encoder that indents makes millions of small strings of a large index.
    """
    hasher = hashlib.sha256()

    def pieces() -> Iterator[bytes]:
        for data in _json_pieces(document):
            hasher.update(data)
            yield data

    write_pieces(path, pieces())
    return hasher.hexdigest()


def _json_pieces(document: Mapping[str, Any]) -> Iterator[bytes]:
    words = json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(document)
    while some := "".join(itertools.islice(words, _JSON_WORDS)):
        yield some.encode()
    yield b"\n"


class Passed:
    """Lets go of a file's pages behind its reader or writer: the memory is for the engine.

    The kernel would keep a whole tree for a next reader, who comes when the memory is gone.
    """

    def __init__(self, fd: int, offset: int = 0):
        self._fd = fd
        self._begin = self._step_begin = self._position = offset

    def go(self, count_bytes: int) -> None:
        """Pass the next bytes."""
        self._position += count_bytes
        if self._position - self._step_begin >= _LET_GO_BYTES:
            # Two steps at once: the first time written pages only begin their way to the disk, and
            # what lies across the end of a step is kept.
            self._let_go(max(self._begin, self._step_begin - _LET_GO_BYTES))
            self._step_begin = self._position

    def all(self) -> None:
        """Let go of everything that was passed; what was written has to be on the disk."""
        self._let_go(self._begin)

    def _let_go(self, begin: int) -> None:
        os.posix_fadvise(self._fd, begin, self._position - begin, os.POSIX_FADV_DONTNEED)


def file_bytes(path: Path, offset: int = 0, size_bytes: int | None = None) -> Iterator[memoryview]:
    """Yield the bytes of a file, or of a span of it; each piece takes the place of the one before.

    They do not stay in memory.

    Raises:
        TransferFailed: The file ends inside of the span.
    """
    left = sys.maxsize if size_bytes is None else size_bytes
    buffer = memoryview(bytearray(min(left, COPY_BYTES)))
    with path.open("rb", buffering=0) as file, named(file.fileno()):
        file.seek(offset)
        passed = Passed(file.fileno(), offset)
        while left and (count := file.readinto(buffer[:left])):
            yield buffer[:count]
            passed.go(count)
            left -= count
        passed.all()
    if left and size_bytes is not None:
        raise TransferFailed(str(path), "became shorter while it was read", "run again")


def hash_file(
    path: Path,
    on_bytes: Callable[[int], None] = lambda count: None,
    offset: int = 0,
    size_bytes: int | None = None,
) -> str:
    """Return the sha256 of a file, or of a span of it."""
    hasher = hashlib.sha256()
    for part in file_bytes(path, offset, size_bytes):
        hasher.update(part)
        on_bytes(len(part))
    return hasher.hexdigest()


def refuse_without_room(directory: Path, needed_bytes: int, what: str) -> None:
    """Refuse before the first byte when the filesystem cannot take them all."""
    usage = os.statvfs(directory)
    free_bytes = usage.f_bavail * usage.f_frsize
    wanted_bytes = int(needed_bytes * (1 + _RESERVE_FRACTION))
    if free_bytes < wanted_bytes:
        raise GateRefused(
            str(directory),
            f"{what} needs {wanted_bytes} bytes, {free_bytes} are free",
            f"free {wanted_bytes - free_bytes} bytes on this filesystem",
        )


def room_left(path: Path) -> str:
    """Say what is free on the filesystem of a path, which may not exist yet."""
    place = path.absolute()
    while not place.is_mount() and place != place.parent:
        place = place.parent
    usage = os.statvfs(place)
    free = f"{usage.f_bavail * usage.f_frsize} bytes"
    # Some filesystems have no fixed number of files and report none.
    files = f" and {usage.f_favail} files" if usage.f_files else ""
    return f"{free}{files} are free on {place}"


@contextmanager
def sole_use(directory: Path) -> Iterator[None]:
    """Hold a lock on ``directory`` (made when missing) that dies with this process.

    Others may pass through it and not read it: who may, can hold the lock as well.
    """
    directory.mkdir(mode=0o711, parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise GateRefused(
                str(directory), "another process is working here", "wait for it to end"
            ) from error
        yield
    finally:
        os.close(fd)


def publish(partial: Path, out: Path) -> None:
    """Make a finished directory appear under its name in one step."""
    for directory, _, _ in os.walk(partial):
        sync_directory(Path(directory))
    try:
        os.rename(partial, out)
    except OSError as error:
        if error.errno not in _NAME_TAKEN:
            raise
        raise TransferFailed(
            str(out), f"cannot take its name ({error.strerror})", "move what is there away"
        ) from error
    sync_directory(out.parent)


def clear(directory: Path, keep: frozenset[str] = frozenset()) -> None:
    """Empty a directory of ours, except the entries in ``keep``."""
    for entry in directory.iterdir():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
