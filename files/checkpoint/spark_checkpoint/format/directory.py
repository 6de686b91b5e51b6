"""Read a local checkpoint directory: its shards, index and configuration."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spark_contract.paths import RECEIPT_NAME

from spark_checkpoint.errors import GateRefused, InputRefused
from spark_checkpoint.format.headers import Header, Tensor, read_header, weight_map
from spark_checkpoint.storage import file_bytes

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
# Some exporters repeat config.json's quantization_config in a file of its own.
QUANTIZATION_NAME = "quantization_config.json"
_DIGITS = re.compile(r"(\d+)")


class Span(NamedTuple):
    path: Path
    offset: int
    size_bytes: int


def read_span(span: Span) -> bytes:
    return b"".join(map(bytes, file_bytes(*span)))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Headers of every shard of a directory.

    ``owner`` says for each name which shard counts. A name in several shards belongs to the
    last one in natural order of file names, because the engine loads files in that order and
    a later load overwrites an earlier one.
    """

    directory: Path
    shards: dict[str, Header]
    owner: dict[str, str]
    duplicates: dict[str, tuple[str, ...]]

    def tensor(self, name: str) -> Tensor:
        return self.shards[self.owner[name]].tensors[name]

    def span(self, name: str, shard: str | None = None) -> Span:
        """Return where the bytes of that copy lie, or those of the copy in ``shard``."""
        shard = shard or self.owner[name]
        header = self.shards[shard]
        size_bytes = header.tensors[name].size_bytes
        return Span(self.directory / shard, header.file_offset(name), size_bytes)


def natural_order(name: str) -> list[str | int]:
    """Sort key that puts shard 9 before shard 10."""
    return [int(part) if part.isdigit() else part for part in _DIGITS.split(name)]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the collector from walking a million fresh objects, none of them garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def files_of(directory: Path) -> list[str]:
    """Return every file below a directory as relative paths, without the receipt."""
    found = [
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and ".cache" not in path.relative_to(directory).parts
    ]
    return sorted(name for name in found if name != RECEIPT_NAME)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read all headers and the index of a directory, and refuse what contradicts itself."""
    if not directory.is_dir():
        raise InputRefused(str(directory), "is not a directory", "fetch the source first")
    names = sorted((path.name for path in directory.glob("*.safetensors")), key=natural_order)
    if not names:
        raise GateRefused(str(directory), "holds no .safetensors file", "fetch the source again")
    with no_garbage_collection():
        # First, while nothing else is in memory: the text of a large index is 40 MB.
        index = read_index(directory)
        known = {name: name for name in index or ()}
        shards = {name: read_header(directory / name, known) for name in names}
    return checkpoint_from_headers(directory, shards, index)


def checkpoint_from_headers(
    directory: Path, shards: dict[str, Header], index: Mapping[str, str] | None
) -> Checkpoint:
    """Return a tree by its headers, in natural order, and refuse what contradicts itself."""
    owner: dict[str, str] = {}
    holders: dict[str, list[str]] = {}
    for shard, header in shards.items():
        for tensor in header.tensors:
            if tensor in owner:
                holders.setdefault(tensor, [owner[tensor]]).append(shard)
            owner[tensor] = shard
    duplicates = {name: tuple(files) for name, files in holders.items()}
    if index is not None:
        _check_index(directory, index, shards)
    for name, files in duplicates.items():
        entries = {(shards[f].tensors[name].dtype, shards[f].tensors[name].shape) for f in files}
        if len(entries) > 1:
            raise GateRefused(
                str(directory),
                f"{name} is in {', '.join(files)} with different dtypes or shapes",
                "use another commit of the base",
            )
    return Checkpoint(directory, shards, owner, duplicates)


def read_index(directory: Path) -> dict[str, str] | None:
    """Return name → shard from the index, or None when the tree has no index."""
    path = directory / INDEX_NAME
    if not path.exists():
        return None
    return weight_map(_read(path), str(path), "fetch it again")


def read_config(directory: Path) -> dict[str, Any]:
    return read_json(directory / CONFIG_NAME)


def read_json(path: Path) -> dict[str, Any]:
    return json_object(_read(path), str(path), "fetch it again")


def json_object(raw: bytes, where: str, fix: str) -> dict[str, Any]:
    try:
        document = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise GateRefused(where, f"is not JSON ({error})", fix) from error
    if not isinstance(document, dict):
        raise GateRefused(where, "is no JSON object", fix)
    return document


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise GateRefused(str(path), "is missing", "fetch the source again") from error


def _check_index(directory: Path, index: Mapping[str, str], shards: dict[str, Header]) -> None:
    for name, shard in index.items():
        if shard not in shards:
            raise GateRefused(
                str(directory / INDEX_NAME),
                f"names the shard {shard}, which is not there",
                "fetch the source again",
            )
        if name not in shards[shard].tensors:
            raise GateRefused(
                str(directory / INDEX_NAME),
                f"says {name} is in {shard}, whose header does not have it",
                "use another commit, or fetch the source again",
            )
