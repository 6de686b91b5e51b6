"""Receipts: a receipt is written last, so a tree with a receipt is complete."""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

from spark_contract import documents
from spark_contract.builder_api import BuildPlan, RankPlan, RequantizePlan
from spark_contract.documents import OPTIONAL, DocumentError
from spark_contract.fetching import is_inside
from spark_contract.paths import RECEIPT_NAME

# Linux limits names to 255 bytes, and paths to 4096 bytes including the tree's directory.
_NAME_BYTES, _PATH_BYTES = 255, 2048


@dataclass(frozen=True, slots=True)
class ReceiptFile:
    """A file with a hash of its content, hashes of its pieces, or both."""

    path: str
    size_bytes: int
    sha256: str | None = field(default=None, metadata=OPTIONAL)
    modified_ns: int | None = field(default=None, metadata=OPTIONAL)
    pieces: tuple[str, ...] | None = field(default=None, metadata=OPTIONAL)  # "SIZE:SHA256" each
    link_of: str | None = field(default=None, metadata=OPTIONAL)  # hard-linked file of the base
    inode: int | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        if not is_inside(self.path):
            raise DocumentError(f"files: path {self.path!r} points outside the directory")
        encoded = self.path.encode(errors="replace")
        longest_name = max(encoded.split(b"/"), key=len)
        is_too_long = len(encoded) > _PATH_BYTES or len(longest_name) > _NAME_BYTES
        if is_too_long or encoded.decode() != self.path:
            raise DocumentError(f"files: path {self.path[:80]!r} is too long or not UTF-8")

    def may_have_changed(self, tree: Path) -> bool:
        """Return whether size, time or inode differ from those at the time of hashing."""
        try:
            status = (tree / self.path).stat()
        except OSError:
            return True
        recorded = (self.size_bytes, self.modified_ns, self.inode)
        return (status.st_size, status.st_mtime_ns, status.st_ino) != recorded


@dataclass(frozen=True, slots=True)
class Receipt:
    SCHEMA_VERSION: ClassVar[int] = 1

    kind: str
    digest: str
    files: tuple[ReceiptFile, ...]
    tool_version: str
    written_at: str

    def __post_init__(self) -> None:
        paths = {file.path for file in self.files}
        if len(paths) != len(self.files):
            raise DocumentError("files: a path occurs twice")
        parents = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
        if conflicts := paths & parents:
            raise DocumentError(f"files: {min(conflicts)!r} is both a file and a directory")

    def is_complete(self, tree: Path) -> bool:
        """Return whether all files exist with the recorded sizes, without reading them."""
        try:
            return all((tree / file.path).stat().st_size == file.size_bytes for file in self.files)
        except OSError:
            return False

    def changed_files(self, tree: Path) -> tuple[str, ...]:
        return tuple(file.path for file in self.files if file.may_have_changed(tree))


@dataclass(frozen=True, slots=True)
class SourceReceipt(Receipt):
    kind: Literal["source"]
    name: str
    commit: str


@dataclass(frozen=True, slots=True)
class CheckpointReceipt(Receipt):
    kind: Literal["checkpoint"]
    recipe_version: int
    plan: BuildPlan
    tensors: int
    report: dict[str, Any]
    # Hash of the donor's tensors that the build read: names, types, shapes and bytes.
    donor_sha256: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class RequantizedReceipt(Receipt):
    kind: Literal["requantized"]
    plan: RequantizePlan
    tensors: int
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankedReceipt(Receipt):
    kind: Literal["ranked"]
    plan: RankPlan
    counted_tokens: int  # of the text


AnyReceipt = SourceReceipt | CheckpointReceipt | RequantizedReceipt | RankedReceipt
_KINDS: dict[str, type[AnyReceipt]] = {
    "checkpoint": CheckpointReceipt,
    "requantized": RequantizedReceipt,
    "ranked": RankedReceipt,
}


def parse(text: str | bytes) -> AnyReceipt:
    data = documents.parse(dict, text)
    return documents.read(_KINDS.get(str(data.get("kind")), SourceReceipt), data)


def find_receipt(tree: Path) -> AnyReceipt | None:
    try:
        return parse((tree / RECEIPT_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError, DocumentError):
        return None


def find_writable_by_others(tree: Path) -> str | None:
    """Describe the first path that another account could change, or return None."""
    for directory, folders, files in os.walk(tree):
        for name in (".", *files, *folders):
            path = Path(directory, name)
            if (reason := why_writable_by_others(path)) is not None:
                return f"{path} {reason}"
    return None


def why_writable_by_others(file: Path | int) -> str | None:
    """Return why another account could write to a path or an open descriptor, or None."""
    status = os.fstat(file) if isinstance(file, int) else file.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if status.st_uid not in (0, os.geteuid()):
        return f"is owned by UID {status.st_uid}, which could change it"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "is group- or world-writable"
    return None
