"""Files and directories: reads with bounded memory, free space, locks, atomic publication."""

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

from spark_contract.files import name_file_in_errors, sync, sync_directory, write_all, write_chunks

from spark_checkpoint.errors import TransferError, ValidationError

COPY_BYTES = 256 << 10
_DROP_BYTES = 8 << 20
WORKERS = min(4, os.cpu_count() or 1)
_JSON_BATCH = 4096
# Free space for directories, headers and filesystem blocks.
_RESERVE_FRACTION = 0.05
# Errors of a rename to an existing name.
_EXISTS_ERRNOS = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})


class Stamp(NamedTuple):
    inode: int
    size_bytes: int
    modified_ns: int


def read_stamp(file: int | Path) -> Stamp:
    status = os.stat(file)
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def write_json(path: Path, document: Mapping[str, Any]) -> str:
    """Write indented JSON durably and return its sha256; encodes in batches to save memory."""
    hasher = hashlib.sha256()
    parts = json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(document)

    def batches() -> Iterator[bytes]:
        while batch := "".join(itertools.islice(parts, _JSON_BATCH)).encode():
            hasher.update(batch)
            yield batch
        hasher.update(b"\n")
        yield b"\n"

    write_chunks(path, batches())
    return hasher.hexdigest()


class PageDropper:
    """Drops processed pages of a file from the page cache, because the engine needs the memory."""

    def __init__(self, fd: int, offset: int = 0):
        self._fd = fd
        self._begin = self._step_begin = self._position = offset

    def advance(self, count_bytes: int) -> None:
        self._position += count_bytes
        if self._position - self._step_begin >= _DROP_BYTES:
            # Drop the previous step again, because the first call only starts writing dirty pages.
            self._drop(max(self._begin, self._step_begin - _DROP_BYTES))
            self._step_begin = self._position

    def finish(self) -> None:
        """Drop all processed pages; call it after fsync."""
        self._drop(self._begin)

    def _drop(self, begin: int) -> None:
        os.posix_fadvise(self._fd, begin, self._position - begin, os.POSIX_FADV_DONTNEED)


@contextmanager
def write_durably(
    path: Path, flags: int, offset: int = 0
) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Yield a function that writes to a file from ``offset``; sync the file at the end."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    try:
        os.lseek(fd, offset, os.SEEK_SET)
        dropper = PageDropper(fd, offset)

        def write(data: bytes | memoryview) -> None:
            write_all(fd, data)
            dropper.advance(len(data))

        yield write
        sync(fd)
        dropper.finish()
    finally:
        os.close(fd)


def read_buffers(
    path: Path, offset: int = 0, size_bytes: int | None = None
) -> Iterator[memoryview]:
    """Yield a file, or a part of it, in a reused buffer; does not fill the page cache."""
    remaining = sys.maxsize if size_bytes is None else size_bytes
    buffer = memoryview(bytearray(min(remaining, COPY_BYTES)))
    with path.open("rb", buffering=0) as file, name_file_in_errors(file.fileno()):
        file.seek(offset)
        dropper = PageDropper(file.fileno(), offset)
        while remaining and (count := file.readinto(buffer[:remaining])):
            yield buffer[:count]
            dropper.advance(count)
            remaining -= count
        dropper.finish()
    if remaining and size_bytes is not None:
        raise TransferError(str(path), "was truncated while it was read", "run the command again")


def hash_file(
    path: Path,
    on_bytes: Callable[[int], None] = lambda count: None,
    offset: int = 0,
    size_bytes: int | None = None,
) -> str:
    hasher = hashlib.sha256()
    for buffer in read_buffers(path, offset, size_bytes):
        hasher.update(buffer)
        on_bytes(len(buffer))
    return hasher.hexdigest()


def check_free_space(directory: Path, needed_bytes: int, purpose: str) -> None:
    usage = os.statvfs(directory)
    free_bytes = usage.f_bavail * usage.f_frsize
    required_bytes = int(needed_bytes * (1 + _RESERVE_FRACTION))
    if free_bytes < required_bytes:
        problem = f"{purpose} needs {required_bytes} bytes, but only {free_bytes} are free"
        fix = f"free {required_bytes - free_bytes} bytes on this filesystem"
        raise ValidationError(str(directory), problem, fix)


def describe_free_space(path: Path) -> str:
    mount = path.absolute()
    while not mount.is_mount() and mount != mount.parent:
        mount = mount.parent
    usage = os.statvfs(mount)
    inodes = f" and {usage.f_favail} inodes" if usage.f_files else ""
    return f"{mount} has {usage.f_bavail * usage.f_frsize} bytes{inodes} free"


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Create and lock a directory. Without read access (mode 0711) other users cannot lock it."""
    directory.mkdir(mode=0o711, parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            fix = "wait until the other process ends"
            raise ValidationError(str(directory), "is used by another process", fix) from error
        yield
    finally:
        os.close(fd)


def publish(partial: Path, out: Path) -> None:
    for directory, _, _ in os.walk(partial):
        sync_directory(Path(directory))
    try:
        os.rename(partial, out)
    except OSError as error:
        if error.errno not in _EXISTS_ERRNOS:
            raise
        fix = "move it away, then run the command again"
        raise TransferError(str(out), f"already exists ({error.strerror})", fix) from error
    sync_directory(out.parent)


def clear(directory: Path, keep: frozenset[str] = frozenset()) -> None:
    for entry in directory.iterdir():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
