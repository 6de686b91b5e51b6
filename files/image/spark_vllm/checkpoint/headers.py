"""Read a checkpoint's index and safetensors headers, and check FP8 block scales, without torch."""

from __future__ import annotations

import json
import math
import re
import statistics
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spark_vllm.checkpoint import names
from spark_vllm.checkpoint.settings import Settings

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors reader

# A negative scale inverts a block, a far too large scale drowns all other weights, and a far too
# small scale removes a block. INT4 and INT8 scales are checked after loading (finite.py).
MAX_SCALE_RATIO = 128
MIN_SCALE_RATIO = 1 / 1024
"""Limits on a block scale divided by its module's median over all layers, without zero blocks."""

_FORMATS = {"F16": "e", "F32": "f"}
_ZEROS = b"\x00\x80"  # e4m3 codes


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
            "fix: pass the directory of a checkpoint built by a deploy"
        ) from error
    problems: list[str] = []
    tensors: dict[str, Tensor] = {}
    unlisted: dict[str, Tensor] = {}
    for file in sorted(set(index.values()), key=load_order):
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


def load_order(file: str) -> list[str | int]:
    """Return a sort key: the engine loads files in this order, and later tensors win."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file)]


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


class _Module(NamedTuple):
    name: str
    weight: Tensor
    scale: Tensor
    values: list[float]


def find_scale_problems(directory: Path, headers: Headers, settings: Settings) -> Iterator[str]:
    modules_by_kind: dict[str, list[_Module]] = defaultdict(list)
    for module in _read_modules(directory, headers, settings):
        invalid = [value for value in module.values if not (math.isfinite(value) and value > 0)]
        if invalid:
            yield (
                f"{module.scale.file}: {module.name}: "
                f"{len(invalid)} of {len(module.values)} scales "
                f"are not positive and finite, such as {invalid[0]:g}"
            )
        else:
            modules_by_kind[re.sub(r"\.\d+\.", ".N.", module.name)].append(module)
    for modules in modules_by_kind.values():
        yield from _find_outliers(directory, modules, settings.block_shape)


def _read_modules(directory: Path, headers: Headers, settings: Settings) -> Iterator[_Module]:
    weight_part = names.FP8_WEIGHT if settings.overlay else "weight"
    scale_part = names.FP8_SCALE if settings.overlay else "weight_scale_inv"
    for module in settings.fp8_modules:
        name = f"{module}.{scale_part}"
        scale = headers.tensors.get(name)
        weight = headers.tensors.get(f"{module}.{weight_part}")
        if scale and weight and len(scale.shape) == len(weight.shape) == 2:
            yield _Module(name, weight, scale, _read_floats(directory, scale))


def _find_outliers(
    directory: Path, modules: list[_Module], block: tuple[int, int]
) -> Iterator[str]:
    values = [value for module in modules for value in module.values]
    if max(values) <= MAX_SCALE_RATIO * min(values):
        return  # Without outliers, do not read the weights, which would take a second.
    # Ignore blocks of zeros, because their scales are arbitrary.
    used = [
        (module, value)
        for module in modules
        for value, is_used in zip(
            module.values, _flag_used_blocks(directory, module.weight, block), strict=True
        )
        if is_used
    ]
    median = statistics.median(value for _, value in used) if used else 0.0
    for module, value in used:
        if not MIN_SCALE_RATIO * median <= value <= MAX_SCALE_RATIO * median:
            yield (
                f"{module.scale.file}: {module.name}: "
                f"scale {value:g} is implausible; the median of similar modules is {median:g} "
                f"(limits: 1/{1 / MIN_SCALE_RATIO:.0f} to {MAX_SCALE_RATIO} times the median)"
            )


def _read_floats(directory: Path, tensor: Tensor) -> list[float]:
    data = _read(directory, tensor, 0, tensor.size_bytes)
    if tensor.dtype == "BF16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    code = _FORMATS.get(tensor.dtype, "f")
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def _flag_used_blocks(directory: Path, weight: Tensor, block: tuple[int, int]) -> Iterator[bool]:
    """Yield, for each block, whether it contains a value other than zero."""
    rows, columns = weight.shape
    for first in range(0, rows, block[0]):
        count = min(block[0], rows - first)
        data = _read(directory, weight, first * columns, count * columns)
        for left in range(0, columns, block[1]):
            starts = range(left, len(data), columns)
            width = min(block[1], columns - left)
            yield any(data[start : start + width].strip(_ZEROS) for start in starts)


def _read(directory: Path, tensor: Tensor, start: int, length: int) -> bytes:
    with (directory / tensor.file).open("rb") as stream:
        stream.seek(tensor.start_bytes + start)
        return stream.read(length)
