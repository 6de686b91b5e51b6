"""Finds wanted files among bytes already on this host, by size and then by hash."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_contract.fetching import FetchFile
from spark_contract.files import sync, write_all

from spark_checkpoint.progress import note
from spark_checkpoint.receipt import PieceHasher, Proof
from spark_checkpoint.storage import Passed, file_bytes

# A folder tree above this is somebody's home, not a model store; looking on would take minutes.
_ENTRY_LIMIT = 200_000


class ContentHash:
    """The hashes of one file as its bytes pass: sha256 always, git blob sha1 when asked for.

    With pieces where the order asks for them: a build that copies them is spared a second hash.
    """

    def __init__(self, file: FetchFile, *, with_pieces: bool):
        self._file = file
        self.size_bytes = file.size_bytes
        self._sha256 = hashlib.sha256()
        self._pieces = PieceHasher() if with_pieces else None
        # Git names a blob by a hash of this prefix and the content; no security rests on it.
        blob = b"blob %d\0" % file.size_bytes
        self._git = hashlib.sha1(blob, usedforsecurity=False) if file.git_sha1 else None

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._sha256.update(data)
        if self._pieces is not None:
            self._pieces.update(data)
        if self._git is not None:
            self._git.update(data)

    def proof(self) -> Proof:
        """Return all hashes of what passed."""
        pieces = self._pieces.pieces() if self._pieces is not None else ()
        return Proof(self._sha256.hexdigest(), pieces)

    def mismatch(self) -> str | None:
        """Say how the content differs from what was locked; None when it is right."""
        for kind, hasher, locked in (
            ("sha256", self._sha256, self._file.sha256),
            ("git sha1", self._git, self._file.git_sha1),
        ):
            if hasher is not None and locked is not None and hasher.hexdigest() != locked:
                return f"{kind} is {hasher.hexdigest()}, locked is {locked}"
        return None


def candidates(
    files: Iterable[FetchFile], look_in: Iterable[str]
) -> dict[int, dict[Path, set[str]]]:
    """Return size → files of that size below the directories that the globs name, with names.

    Links are followed to the file behind them; its names are those of all links to it. In a hub
    cache the link named by the hash may lead to a blob that repositories share, with another name.
    """
    found: dict[int, dict[Path, set[str]]] = {file.size_bytes: {} for file in files}
    seen: dict[tuple[int, int], Path] = {}
    for pattern in look_in:
        for root in sorted(glob.glob(pattern)):
            for path in _walk(Path(root)):
                try:
                    status = path.stat()
                except OSError:
                    # Dangling links and files of others are no candidates.
                    continue
                if status.st_size in found:
                    identity = (status.st_dev, status.st_ino)
                    target = seen.setdefault(identity, path.resolve())
                    found[status.st_size].setdefault(target, set()).add(path.name)
    return found


@contextmanager
def held(path: Path, size_bytes: int) -> Iterator[int]:
    """Hold a file that was found: who owns its folder may put anything in its place meanwhile.

    Raises:
        OSError: It is no file of that size any more; a pipe or a device is not even opened.
    """
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
            raise OSError(errno.ESTALE, "is another file by now", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def name_of(descriptor: int) -> Path:
    """Return a name that leads to what is held, and to nothing else."""
    return Path(f"/proc/self/fd/{descriptor}")


def hash_into(
    path: Path,
    content: ContentHash,
    on_bytes: Callable[[int], None] = lambda count: None,
    size_bytes: int | None = None,
) -> ContentHash:
    """Feed a file to its hashes, or so many bytes of one that may grow meanwhile."""
    for part in file_bytes(path, 0, size_bytes):
        content.update(part)
        on_bytes(len(part))
    return content


def copy_hashed(path: Path, target: Path, content: ContentHash) -> ContentHash:
    """Copy a file, and no more than was wanted, and hash what was copied."""
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    passed = Passed(fd)
    try:
        for part in file_bytes(path, 0, content.size_bytes):
            content.update(part)
            write_all(fd, part)
            passed.go(len(part))
        sync(fd)
        passed.all()
    finally:
        os.close(fd)
    return content


def _walk(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    left = _ENTRY_LIMIT
    for directory, below, names in os.walk(root):
        below[:] = sorted(name for name in below if not name.endswith(".partial"))
        left -= len(names) + 1
        if left < 0:
            note(f"look_in: {root}: more than {_ENTRY_LIMIT} entries, the rest is not searched")
            return
        for name in names:
            path = Path(directory, name)
            if path.is_file():
                yield path
