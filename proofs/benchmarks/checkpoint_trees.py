"""Synthetic sources with the names, dtypes and file layout of the real repositories.

Only shared experts, their FP8 form and the LM head have meaningful values. Other tensors are
filler, or holes when ``sparse``.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.model.original import FLOAT32, is_fp8, is_int4, main_shapes, mtp_shapes
from lab.model.rounding import bf16_bits
from lab.model.shape import BLOCK, GROUP, Shape

COMMIT = "b" * 40
DONOR_COMMIT = "d" * 40
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}

Entry = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Architecture(Shape):
    """Sizes of a Qwen3.5-MoE model and its files; the defaults are those of 122B-A10B."""

    layers: int = 48
    hidden: int = 3072
    vocabulary: int = 248320
    experts: int = 256
    expert_width: int = 1024
    shared_width: int = 1024
    heads: int = 32
    head_dim: int = 256
    linear_key_heads: int = 16
    linear_value_heads: int = 64
    linear_head_dim: int = 128
    vision_depth: int = 27
    vision_hidden: int = 1152
    vision_width: int = 4304
    vision_positions: int = 2304
    shards: int = 14
    donor_shards: int = 39


def int4(module: str, outputs: int, inputs: int) -> list[Entry]:
    groups = inputs // GROUP
    return [
        (f"{module}.qweight", "I32", (inputs // 8, outputs)),
        (f"{module}.qzeros", "I32", (groups, outputs // 8)),
        (f"{module}.scales", "F16", (groups, outputs)),
    ]


def fp8(module: str, outputs: int, inputs: int) -> list[Entry]:
    grid = (-(-outputs // BLOCK), -(-inputs // BLOCK))
    return [
        (f"{module}.weight", "F8_E4M3", (outputs, inputs)),
        (f"{module}.weight_scale_inv", "BF16", grid),
    ]


def plain(name: str, size: tuple[int, ...]) -> Entry:
    return name, "F32" if name.endswith(FLOAT32) else "BF16", size


def mtp(a: Architecture) -> list[Entry]:
    return [plain(name, size) for name, size in mtp_shapes(a).items()]


def base_entries(a: Architecture) -> list[Entry]:
    entries: list[Entry] = []
    for name, size in main_shapes(a).items():
        module = name.removesuffix(".weight")
        entries += int4(module, *size) if is_int4(name) else [plain(name, size)]
    return entries


def donor_entries(a: Architecture) -> list[Entry]:
    entries: list[Entry] = []
    for name, size in {**main_shapes(a), **mtp_shapes(a)}.items():
        module = name.removesuffix(".weight")
        entries += fp8(module, *size) if is_fp8(name) else [plain(name, size)]
    return entries


def size_of(entry: Entry) -> int:
    return int(np.prod(entry[2])) * ITEM_BYTES[entry[1]]


def shared_expert_values(module: str, shape: tuple[int, int]) -> Any:
    seed = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "little")
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)
    return bf16_bits(values).astype("<u2")


class Filler:
    """Cheap bytes without long runs, for tensors that no recipe reads."""

    def __init__(self) -> None:
        self._pool = np.random.default_rng(7).bytes(32 << 20)

    def chunks(self, size_bytes: int) -> Iterator[bytes]:
        while size_bytes > 0:
            piece = self._pool[: min(size_bytes, len(self._pool))]
            yield piece
            size_bytes -= len(piece)


def write_shard(
    path: Path, entries: list[Entry], values: Mapping[str, bytes], filler: Filler | None
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        end = position + size_of(entry)
        header[entry[0]] = {
            "dtype": entry[1],
            "shape": list(entry[2]),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for entry in entries:
            data = values.get(entry[0])
            if data is not None:
                file.write(data)
            elif filler is not None:
                for piece in filler.chunks(size_of(entry)):
                    file.write(piece)
            else:
                file.seek(size_of(entry), 1)
        file.truncate(8 + len(raw) + position)


def split(entries: list[Entry], shards: int) -> list[list[Entry]]:
    limit = sum(map(size_of, entries)) / shards
    result: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if filled >= limit * len(result) and len(result) < shards:
            result.append([])
        result[-1].append(entry)
        filled += size_of(entry)
    return result
