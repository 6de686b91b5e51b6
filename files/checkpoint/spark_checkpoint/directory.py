"""Read a checkpoint directory: shards, index and configuration."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from spark_contract.paths import RECEIPT_NAME

from spark_checkpoint import InputError, ValidationError
from spark_checkpoint.headers import Header, Tensor, parse_weight_map, read_header
from spark_checkpoint.storage import read_buffers

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
# Some exporters also write quantization_config to this file.
QUANTIZATION_NAME = "quantization_config.json"


class Span(NamedTuple):
    path: Path
    offset: int
    size_bytes: int


def read_span(span: Span) -> bytes:
    return b"".join(map(bytes, read_buffers(*span)))


class Checkpoint(NamedTuple):
    """Headers of all shards of a directory.

    ``owner`` maps tensors to shards. If several shards have a tensor, the last shard in natural
    order is the owner, because the engine loads files in that order.
    """

    directory: Path
    shards: dict[str, Header]
    owner: dict[str, str]
    duplicates: dict[str, tuple[str, ...]]

    def tensor(self, name: str) -> Tensor:
        return self.shards[self.owner[name]].tensors[name]

    def span(self, name: str, shard: str | None = None) -> Span:
        shard = shard or self.owner[name]
        header = self.shards[shard]
        size_bytes = header.tensors[name].size_bytes
        return Span(self.directory / shard, header.file_offset(name), size_bytes)


def natural_sort_key(name: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def list_files(directory: Path) -> list[str]:
    names = []
    for path in directory.rglob("*"):
        relative = path.relative_to(directory)
        name = str(relative)
        # A killed process may have left an unfinished receipt.
        is_receipt = name == RECEIPT_NAME or name.startswith(f".{RECEIPT_NAME}.")
        if path.is_file() and ".cache" not in relative.parts and not is_receipt:
            names.append(name)
    return sorted(names)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read all headers and the index; raise ValidationError if they contradict each other."""
    if not directory.is_dir():
        raise InputError(str(directory), "is not a directory", "download the source first")
    names = sorted((path.name for path in directory.glob("*.safetensors")), key=natural_sort_key)
    if not names:
        fix = "download the source again"
        raise ValidationError(str(directory), "has no .safetensors file", fix)
    # Read the index first, so that its text (up to 40 MB) is freed before the headers load.
    index = read_index(directory)
    interned = {name: name for name in index or ()}
    shards = {name: read_header(directory / name, interned) for name in names}
    return checkpoint_from_headers(directory, shards, index)


def checkpoint_from_headers(
    directory: Path, shards: dict[str, Header], index: Mapping[str, str] | None
) -> Checkpoint:
    """Return a checkpoint; reject tensors whose copies differ in dtype or shape."""
    owner: dict[str, str] = {}
    copies: dict[str, list[str]] = {}
    # Engines ignore shards that the index omits, so let the other shards override them.
    listed = set(index.values()) if index is not None else set(shards)
    for shard in sorted(shards, key=listed.__contains__):
        for tensor in shards[shard].tensors:
            if tensor in owner:
                copies.setdefault(tensor, [owner[tensor]]).append(shard)
            owner[tensor] = shard
    if index is not None:
        _check_index(str(directory / INDEX_NAME), index, shards)
    for name, files in copies.items():
        if len({shards[file].tensors[name].dtype_and_shape for file in files}) > 1:
            problem = f"{name} has different dtypes or shapes in {', '.join(files)}"
            raise ValidationError(str(directory), problem, "use another commit of the base")
    duplicates = {name: tuple(files) for name, files in copies.items()}
    return Checkpoint(directory, shards, owner, duplicates)


def _check_index(where: str, index: Mapping[str, str], shards: dict[str, Header]) -> None:
    for name, shard in index.items():
        if shard not in shards:
            fix = "download the source again"
            raise ValidationError(where, f"lists the shard {shard}, which is missing", fix)
        if name not in shards[shard].tensors:
            fix = "use another commit, or download the source again"
            raise ValidationError(where, f"lists {name} in {shard}, but that file lacks it", fix)


def read_index(directory: Path) -> dict[str, str] | None:
    """Return the shard of each tensor, or None if there is no index."""
    path = directory / INDEX_NAME
    if not path.exists():
        return None
    return parse_weight_map(_read(path), str(path), "download it again")


def read_config(directory: Path) -> dict[str, Any]:
    return read_json(directory / CONFIG_NAME)


def read_json(path: Path) -> dict[str, Any]:
    return parse_object(_read(path), str(path), "download it again")


def parse_object(raw: bytes, where: str, fix: str) -> dict[str, Any]:
    try:
        document = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValidationError(where, f"is not valid JSON ({error})", fix) from error
    if not isinstance(document, dict):
        raise ValidationError(where, "is not a JSON object", fix)
    return document


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ValidationError(str(path), "is missing", "download the source again") from error
