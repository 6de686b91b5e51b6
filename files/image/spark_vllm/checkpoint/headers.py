"""Read index and safetensors headers of a checkpoint."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors reader


@dataclass(frozen=True)
class Tensor:
    file: str
    dtype: str
    shape: tuple[int, ...]
    start_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class Headers:
    index: dict[str, str]
    tensors: dict[str, Tensor]
    unlisted: dict[str, Tensor]
    problems: tuple[str, ...]


def read_headers(directory: Path) -> Headers:
    """Read the index and all headers; list missing files as problems.

    Raise ValueError if the index is unreadable.
    """
    try:
        index: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{directory / INDEX}: unreadable ({type(error).__name__}: {error}); "
            "fix: pass the directory of a checkpoint that a deploy built"
        ) from error
    problems: list[str] = []
    tensors: dict[str, Tensor] = {}
    unlisted: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        try:
            header = read_header(directory / file)
        except (OSError, ValueError) as error:
            problems.append(f"{file}: unreadable ({error})")
            continue
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            tensor = Tensor(file, entry["dtype"], shape, start, end - start)
            (tensors if index.get(name) == file else unlisted)[name] = tensor
    readable = {name for name, file in index.items() if (directory / file).is_file()}
    problems += [
        f"{index[name]}: lacks tensor {name}" for name in sorted(readable - tensors.keys())
    ]
    return Headers(index, tensors, unlisted, tuple(problems))


def read_header(path: Path) -> dict[str, Any]:
    """Return header entries, with offsets from the start of the file.

    Raise ValueError if the file is truncated or not a safetensors file.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, size_bytes - 8):
            raise ValueError("it has no safetensors header")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size_bytes:
        raise ValueError(f"it has {size_bytes} bytes, but the header requires {8 + length + end}")
    for entry in header.values():
        entry["data_offsets"] = [8 + length + offset for offset in entry["data_offsets"]]
    return header
