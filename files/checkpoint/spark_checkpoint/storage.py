"""Files and directories: bounded reads, hashes, search, free space, locks, atomic publication."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import itertools
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from spark_contract.fetching import FetchFile
from spark_contract.files import name_file_in_errors, sync, sync_directory, write_all, write_chunks

from spark_checkpoint import TransferError, ValidationError
from spark_checkpoint.progress import note

COPY_BYTES = 256 << 10
_DROP_BYTES = 8 << 20
WORKERS = min(4, os.cpu_count() or 1)
_JSON_BATCH = 4096
# Small pieces reduce hashing around replaced tensors; large pieces keep receipts short (17,000
# pieces for 72 GB).
PIECE_BYTES = 4 << 20
# Searching larger directories, such as a home directory, takes minutes.
_ENTRY_LIMIT = 200_000
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


def write_json(path: Path, document: Mapping[str, Any] | Sequence[int]) -> str:
    """Write indented JSON durably, in batches to save memory; return the file's sha256."""
    parts = json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(document)
    batches = iter(lambda: "".join(itertools.islice(parts, _JSON_BATCH)).encode(), b"")
    write_chunks(path, itertools.chain(batches, (b"\n",)))
    return hash_file(path)


class PageDropper:
    """Drops processed pages of a file from the page cache, because the engine needs the memory."""

    def __init__(self, fd: int, offset: int = 0):
        self._fd = fd
        self._begin = self._step_begin = self._position = offset

    def advance(self, count_bytes: int) -> None:
        self._position += count_bytes
        if self._position - self._step_begin >= _DROP_BYTES:
            # Also drop the previous step, because its first drop only started to write dirty pages.
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
    """Yield a file, or a part of it, in a reused buffer; drop its pages from the page cache."""
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
        raise TransferError(
            str(path), "was truncated while it was being read", "run the command again"
        )


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


class Piece(NamedTuple):
    size_bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.size_bytes}:{self.sha256}"


class FileHashes(NamedTuple):
    sha256: str
    pieces: tuple[Piece, ...]
    stamp: Stamp | None = None  # when the hashes were verified


class PieceHasher:
    """Hashes a stream in pieces of ``PIECE_BYTES``."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()
        self._filled_bytes = 0
        self._pieces: list[Piece] = []

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            part = view[: PIECE_BYTES - self._filled_bytes]
            self._hasher.update(part)
            self._filled_bytes += len(part)
            view = view[len(part) :]
            if self._filled_bytes == PIECE_BYTES:
                self._end_piece()

    def add(self, piece: Piece) -> None:
        """Add a piece whose hash is known."""
        self._end_piece()
        self._pieces.append(piece)

    def pieces(self) -> tuple[Piece, ...]:
        self._end_piece()
        return tuple(self._pieces)

    def _end_piece(self) -> None:
        if self._filled_bytes:
            self._pieces.append(Piece(self._filled_bytes, self._hasher.hexdigest()))
            self._hasher, self._filled_bytes = hashlib.sha256(), 0


def hash_with_pieces(path: Path, on_bytes: Callable[[int], None]) -> FileHashes:
    stamp = read_stamp(path)
    whole, pieces = hashlib.sha256(), PieceHasher()
    for buffer in read_buffers(path):
        whole.update(buffer)
        pieces.update(buffer)
        on_bytes(len(buffer))
    return FileHashes(whole.hexdigest(), pieces.pieces(), stamp)


class ContentHash:
    """Hashes a file's bytes: sha256, the git blob sha1 if it is locked, and optionally pieces."""

    def __init__(self, file: FetchFile, *, with_pieces: bool):
        self._file = file
        self._sha256 = hashlib.sha256()
        self._pieces = PieceHasher() if with_pieces else None
        self._git_sha1 = None
        if file.git_sha1:
            prefix = b"blob %d\0" % file.size_bytes
            self._git_sha1 = hashlib.sha1(prefix, usedforsecurity=False)

    def update(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        if self._pieces is not None:
            self._pieces.update(data)
        if self._git_sha1 is not None:
            self._git_sha1.update(data)

    def update_from(
        self,
        path: Path,
        on_bytes: Callable[[int], None] = lambda count: None,
        size_bytes: int | None = None,
    ) -> None:
        for buffer in read_buffers(path, 0, size_bytes):
            self.update(buffer)
            on_bytes(len(buffer))

    def hashes(self) -> FileHashes:
        pieces = self._pieces.pieces() if self._pieces is not None else ()
        return FileHashes(self._sha256.hexdigest(), pieces)

    def mismatch(self) -> str | None:
        """Return how the hashes differ from the locked hashes, or None if they match."""
        for kind, hasher, locked in (
            ("sha256", self._sha256, self._file.sha256),
            ("git sha1", self._git_sha1, self._file.git_sha1),
        ):
            if hasher is not None and locked is not None and hasher.hexdigest() != locked:
                return f"{kind} is {hasher.hexdigest()}, but the lock has {locked}"
        return None


def check_free_space(directory: Path, needed_bytes: int, purpose: str) -> None:
    usage = os.statvfs(directory)
    free_bytes = usage.f_bavail * usage.f_frsize
    required_bytes = int(needed_bytes * (1 + _RESERVE_FRACTION))
    if free_bytes < required_bytes:
        problem = f"{purpose} needs {required_bytes} bytes, but only {free_bytes} are free"
        fix = f"free {required_bytes - free_bytes} bytes on this filesystem"
        raise ValidationError(str(directory), problem, fix)


def used_bytes(directory: Path) -> int:
    """Return the disk space of a directory's files; 0 if it is missing."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def describe_free_space(path: Path) -> str:
    mount = path.absolute()
    while not mount.is_mount() and mount != mount.parent:
        mount = mount.parent
    usage = os.statvfs(mount)
    inodes = f" and {usage.f_favail} inodes" if usage.f_files else ""
    return f"{mount} has {usage.f_bavail * usage.f_frsize} bytes{inodes} free"


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Create and lock a directory; its mode, 0711, prevents other users from locking it."""
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
        fix = "move it elsewhere, then run the command again"
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


def find_candidates(
    files: Iterable[FetchFile], look_in: Iterable[str]
) -> dict[int, dict[Path, set[str]]]:
    """Return local files by size; map each file to its names, including the names of links."""
    by_size: dict[int, dict[Path, set[str]]] = {file.size_bytes: {} for file in files}
    targets: dict[tuple[int, int], Path] = {}
    roots = (Path(root) for pattern in look_in for root in sorted(glob.glob(pattern)))
    for path in itertools.chain.from_iterable(map(_walk, roots)):
        try:
            status = path.stat()
        except OSError:
            continue
        is_candidate = stat.S_ISREG(status.st_mode) and status.st_size in by_size
        # Compressing filesystems may need only an eighth of the size, and no block for tiny files.
        is_sparse = (status.st_blocks + 1) * 512 * 8 < status.st_size
        if is_candidate and not is_sparse:
            target = targets.setdefault((status.st_dev, status.st_ino), path.resolve())
            by_size[status.st_size].setdefault(target, set()).add(path.name)
    return by_size


@contextmanager
def pin_file(path: Path, size_bytes: int) -> Iterator[int]:
    """Yield a descriptor of a file, because another user could replace the file at its path.

    Raise OSError for pipes, devices and files of a different size.
    """
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
            raise OSError(errno.ESTALE, "was replaced during the download", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files below a directory, which other users may have nested to any depth."""
    if root.is_file():
        yield root
        return
    entry_count, directories = 0, [os.fspath(root)]
    while directories:
        # Ignore directories that are not accessible, disappear, or have too long a path.
        with contextlib.suppress(OSError), os.scandir(directories.pop()) as entries:
            for entry in entries:
                entry_count += 1
                if entry_count > _ENTRY_LIMIT:
                    note(f"look_in: searching only the first {_ENTRY_LIMIT} entries of {root}")
                    return
                if entry.is_dir(follow_symlinks=False):
                    if not entry.name.endswith(".partial"):
                        directories.append(entry.path)
                else:
                    yield Path(entry.path)
