"""Block sizes of the LM-head kernel by compute capability and batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE_PATH = Path(__file__).with_name("tiles.json")
"""The shipped table. Every tile is correct for any batch and shape; only speed differs."""


@dataclass(frozen=True)
class Tile:
    """Block sizes and options of the kernel for batches up to ``max_batch``."""

    max_batch: int | None
    block_m: int
    block_n: int
    groups_per_step: int  # groups loaded together; ignored unless it divides the input
    split: bool  # activations as two INT8 halves instead of weights as BF16
    warps: int
    stages: int  # tiles in flight
    programs_per_processor: int  # 0 means one program per tile
    batch_first: bool = False  # batch as first operand of the product; block_m is at least 16
    bulk_copies: bool = False  # load with the copy engine of 9.0 and later; needs a descriptor
    early: bool = False  # launched before the previous kernel has finished; 9.0 and later
    keep_output: bool = False  # logits stay in the cache, where the sampler reads them next


def read_table(path: Path = TABLE_PATH) -> dict[str, tuple[Tile, ...]]:
    """Return the tiles per compute capability (``"12.1"``) and for ``"default"``.

    Raise ValueError if limits do not rise to null, or if the default is missing.
    """
    data: Mapping[str, Any] = json.loads(path.read_text())
    table = {name: tuple(Tile(**tile) for tile in tiles) for name, tiles in data["tiles"].items()}
    for name, tiles in table.items():
        limits = [tile.max_batch for tile in tiles]
        if limits != [*sorted({limit for limit in limits if limit is not None}), None]:
            raise ValueError(
                f"{path}: tiles of {name!r} have limits {limits}; "
                "fix: sort them, with null only at the end"
            )
    if "default" not in table:
        raise ValueError(f"{path}: lacks tiles named 'default'; fix: add them")
    return table


def tiles_for(capability: tuple[int, int], table: Mapping[str, Sequence[Tile]]) -> Sequence[Tile]:
    return table.get(f"{capability[0]}.{capability[1]}", table["default"])


def tile_for(batch: int, tiles: Sequence[Tile]) -> Tile:
    return next(tile for tile in tiles if tile.max_batch is None or batch <= tile.max_batch)
