"""Receipts: written last into a tree, the only proof that it is whole."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from spark_contract import documents
from spark_contract.documents import OPTIONAL, DocumentError
from spark_contract.fetching import is_inside
from spark_contract.orders import BuildPlan, RequantizePlan
from spark_contract.paths import RECEIPT_NAME


@dataclass(frozen=True, slots=True)
class ReceiptFile:
    """One file a receipt vouches for: by one hash of all, by one for each piece, or by both."""

    path: str
    size_bytes: int
    sha256: str | None = field(default=None, metadata=OPTIONAL)
    modified_ns: int | None = field(default=None, metadata=OPTIONAL)
    pieces: tuple[str, ...] | None = field(default=None, metadata=OPTIONAL)  # "SIZE:SHA256" each
    link_of: str | None = field(default=None, metadata=OPTIONAL)  # the base's own file
    inode: int | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        """Refuse a file outside of the tree."""
        if not is_inside(self.path):
            raise DocumentError(f"files: path {self.path!r} leaves the tree")

    def is_touched(self, tree: Path) -> bool:
        """Return whether the file may be another than the one that was hashed, by its stat."""
        try:
            stat = (tree / self.path).stat()
        except OSError:
            return True
        seen = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        return seen != (self.size_bytes, self.modified_ns, self.inode)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the receipts of all kinds of trees say."""

    SCHEMA_VERSION: ClassVar[int] = 1

    kind: str
    digest: str  # of what was ordered
    files: tuple[ReceiptFile, ...]
    tool_version: str
    written_at: str

    def is_whole(self, tree: Path) -> bool:
        """Return whether every file is there with its size (somebody may tidy up)."""
        try:
            return all((tree / f.path).stat().st_size == f.size_bytes for f in self.files)
        except OSError:
            return False

    def touched(self, tree: Path) -> tuple[str, ...]:
        """Return the files that may be others than those that were hashed."""
        return tuple(file.path for file in self.files if file.is_touched(tree))


@dataclass(frozen=True, slots=True)
class SourceReceipt(Receipt):
    """Of a tree that was fetched."""

    kind: Literal["source"]
    name: str
    commit: str


@dataclass(frozen=True, slots=True)
class CheckpointReceipt(Receipt):
    """Of a tree that was built."""

    kind: Literal["checkpoint"]
    recipe_version: int
    plan: BuildPlan
    tensors: int
    report: dict[str, Any]  # for people: bytes, errors, duplicates


@dataclass(frozen=True, slots=True)
class RequantizedReceipt(Receipt):
    """Of an INT4 tree that was quantised here."""

    kind: Literal["requantized"]
    plan: RequantizePlan
    tensors: int
    report: dict[str, Any]  # for people: versions, seconds, errors


AnyReceipt = SourceReceipt | CheckpointReceipt | RequantizedReceipt


def parse(text: str | bytes) -> AnyReceipt:
    """Return the receipt in a text.

    Raises:
        DocumentError: It is none of ours.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"not JSON: {error}") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "checkpoint":
        return documents.read(CheckpointReceipt, data)
    if kind == "requantized":
        return documents.read(RequantizedReceipt, data)
    return documents.read(SourceReceipt, data)


def found(tree: Path) -> AnyReceipt | None:
    """Return the receipt of a tree; ``None`` when there is none that proves anything."""
    try:
        return parse((tree / RECEIPT_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError, DocumentError):
        return None


def exposed(tree: Path) -> str | None:
    """Say which part of a tree somebody else could change after it was proven; ``None``: none.

    A hard link into somebody's home shares its owner and mode, so both are looked at.
    """
    for place, folders, names in os.walk(tree):
        inside = (Path(place) / name for name in (*names, *folders))
        for path in (Path(place), *inside):
            why = why_not_ours(path)
            if why is not None:
                return f"{path} {why}"
    return None


def why_not_ours(file: Path | int) -> str | None:
    """Say why a file or folder is not root's alone to write (or ours); ``None`` when it is.

    Args:
        file: by name, or held by a descriptor.
    """
    status = os.fstat(file) if isinstance(file, int) else file.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to account {status.st_uid}, who could change it"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by others than its owner"
    return None
