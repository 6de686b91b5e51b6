"""Files we own on a host: path, mode and content, decided before connecting.

Everything that writes plain files on a host goes through ``ManagedFile``, so one list tells what
we manage, one fact compares it with the host and one operation repairs what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ManagedFile:
    """One regular file, owned by root:root."""

    path: str
    content: bytes = field(repr=False)  # may be a secret
    mode: int = 0o644

    @property
    def sha256(self) -> str:
        """Return the hash of the content, as ``sha256sum`` prints it."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class FileState:
    """What a host has at a path: mode bits, owner and content hash of a regular file."""

    mode: int
    owner: str
    sha256: str


def differing(
    files: Iterable[ManagedFile], states: dict[str, FileState]
) -> tuple[ManagedFile, ...]:
    """Return the files that are absent, of other content, mode or owner on the host."""
    return tuple(
        file
        for file in files
        if states.get(file.path) != FileState(file.mode, "root:root", file.sha256)
    )
