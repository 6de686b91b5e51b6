"""What lies on the host's disk: documents that are whole or absent, locks, and releases."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from spark_contract import documents, files
from spark_contract.documents import DocumentError
from spark_contract.files import remove as remove

from spark_host.system.stored import load as load
from spark_host.system.stored import names as names

_T = TypeVar("_T")


def read(kind: type[_T], path: Path) -> _T | None:
    """Return a document; ``None`` when it is absent or not that document.

    A file cut short by a power loss proves nothing, so it counts as absent.
    """
    try:
        return documents.parse(kind, path.read_text())
    except (FileNotFoundError, NotADirectoryError, DocumentError, UnicodeDecodeError):
        return None


def write(path: Path, document: Any) -> None:
    """Replace ``path`` by a document, atomically and durably."""
    files.write_text(path, documents.text_of(document))


def exists(path: Path) -> bool:
    """Return whether there is something at ``path``, readable or not."""
    return path.exists()


def listed(directory: Path) -> list[str]:
    """Return the names in a directory; an absent one is empty."""
    return sorted(os.listdir(directory)) if directory.is_dir() else []


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at ``path`` for the duration of a block.

    Raises:
        BlockingIOError: Another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Opened without inheritance: a child must not keep the lock of a process that was killed.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
