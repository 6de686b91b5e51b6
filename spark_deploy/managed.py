"""Files we own on a host: path, mode and content, decided before connecting.

Everything that writes plain files on a host goes through ``ManagedFile``, so one list tells what
we manage, one fact compares it with the host and one operation repairs what differs.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shlex
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


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


def tree(source: Path, target: str, *, executable: Iterable[str] = ()) -> tuple[ManagedFile, ...]:
    """List the files below ``source`` as they shall stand below ``target``, sorted by path.

    Bytecode is left out; ``executable`` names relative paths that get mode 0755.
    """
    runnable = set(executable)
    found = []
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source).as_posix()
        if path.is_dir() or "__pycache__" in path.parts or path.suffix == ".pyc":
            continue
        mode = 0o755 if relative in runnable else 0o644
        found.append(ManagedFile(f"{target}/{relative}", path.read_bytes(), mode))
    return tuple(found)


def archive(files: Iterable[ManagedFile]) -> str:
    """Pack file contents as base64 of a tar whose members are named by position.

    Text, because it travels on a command's standard input; positions, because no path of ours
    may steer what ``tar`` writes.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for number, file in enumerate(files):
            info = tarfile.TarInfo(str(number))
            info.size, info.mode = len(file.content), 0o600
            tar.addfile(info, io.BytesIO(file.content))
    return base64.encodebytes(buffer.getvalue()).decode()


def unpack_script(files: Iterable[ManagedFile]) -> str:
    """Return the shell script that puts ``archive(files)`` from standard input in place.

    Each file is written beside its target, flushed, and renamed over it, so that a reader
    sees the old or the new content and never half of either.
    """
    lines = [
        "set -e; umask 077; d=$(mktemp -d); trap 'rm -rf \"$d\"' EXIT",
        'base64 -d | tar -xzf - -C "$d"',
        'put() { install -D -o root -g root -m "$2" "$d/$1" "$3.spark-new"'
        ' && sync "$3.spark-new" && mv -fT "$3.spark-new" "$3"; }',
        # `install -D` creates parents with the umask; ours are for everyone to look into.
        "umask 022",
    ]
    lines += [
        f"put {number} {file.mode:o} {shlex.quote(file.path)}" for number, file in enumerate(files)
    ]
    return "\n".join(lines)
