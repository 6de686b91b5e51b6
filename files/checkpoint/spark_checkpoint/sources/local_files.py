"""Find required files on this host, first by size and then by hash."""

import contextlib
import errno
import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spark_contract.fetching import FetchFile

from spark_checkpoint.progress import note
from spark_checkpoint.storage import read_buffers
from spark_checkpoint.verify import FileHashes, PieceHasher

# Searching larger directories, such as a home directory, takes minutes.
_ENTRY_LIMIT = 200_000


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


def find_candidates(
    files: Iterable[FetchFile], look_in: Iterable[str]
) -> dict[int, dict[Path, set[str]]]:
    """Map sizes to local files, and each file to its names, including links to it."""
    by_size: dict[int, dict[Path, set[str]]] = {file.size_bytes: {} for file in files}
    targets: dict[tuple[int, int], Path] = {}
    roots = (Path(root) for pattern in look_in for root in sorted(glob.glob(pattern)))
    for path in (path for root in roots for path in _walk(root)):
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


@contextlib.contextmanager
def pin_file(path: Path, size_bytes: int) -> Iterator[int]:
    """Yield a descriptor of a file, because the owner could replace the file at the path.

    Raise OSError for pipes, devices and files of a different size.
    """
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
            raise OSError(errno.ESTALE, "was replaced by another file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files below a directory; other users may have created it with any depth."""
    if root.is_file():
        yield root
        return
    count, directories = 0, [os.fspath(root)]
    while directories:
        # Ignore directories that are not accessible, disappear, or have too long a path.
        with contextlib.suppress(OSError), os.scandir(directories.pop()) as entries:
            for entry in entries:
                count += 1
                if count > _ENTRY_LIMIT:
                    note(f"look_in: {root}: only the first {_ENTRY_LIMIT} entries are searched")
                    return
                if entry.is_dir(follow_symlinks=False):
                    if not entry.name.endswith(".partial"):
                        directories.append(entry.path)
                else:
                    yield Path(entry.path)
