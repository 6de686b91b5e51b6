"""Choose the kernel of the opt-in INT8 head, its block sizes, and the tokens of drafts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

KERNELS = ("own", "marlin", "bf16")
FALLBACK = "marlin"
GROUP_SIZE = 128
"""Inputs that share a scale."""
IMAGE_VARIABLE = "SPARK_IMAGE"
"""Environment variable with the image digest; the plan sets it if the head is measured."""

Times = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class HeadSetup:
    device: str
    driver: str
    image: str
    rows: int
    in_features: int
    batches: tuple[int, ...]


def list_head_batches(max_sequences: int, drafts: int) -> tuple[int, ...]:
    """Return the head's batch sizes in rows, for 1 to ``max_sequences`` sequences."""
    return tuple(count * (1 + drafts) for count in range(1, max_sequences + 1))


def frequent_token_ids(tokenizer: Path, count: int, vocabulary: int) -> list[int]:
    """Return the sorted ids of the ``count`` tokens that drafts are chosen from.

    Ids of a BPE vocabulary are in the order of its merges, so low ids are frequent. Added tokens,
    such as the end of a turn, have the highest ids and are included.
    """
    file = tokenizer / "tokenizer.json"
    added = json.loads(file.read_text("utf-8"))["added_tokens"] if file.exists() else []
    special = {token["id"] for token in added if token["id"] < vocabulary}
    others = [token for token in range(vocabulary) if token not in special]
    return sorted([*special, *others[: max(0, count - len(special))]])


def read_token_ids(path: Path, count: int, vocabulary: int) -> list[int]:
    """Return the token ids in a JSON file; raise ValueError unless ``count`` ids are valid."""
    try:
        ids = json.loads(path.read_text("utf-8"))
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise ValueError("is not a list of token ids")
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"has ids outside 0 to {vocabulary - 1}")
        if len(set(ids)) != len(ids):
            raise ValueError("has duplicate ids")
        if len(ids) != min(count, vocabulary):
            raise ValueError(f"has {len(ids)} ids, expected {min(count, vocabulary)}")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: {error}; fix: delete the file's directory and run the deploy again, "
            "or remove spark.draft_vocabulary_file"
        ) from error
    return ids


def select_fastest(times: Times) -> str:
    """Return the kernel with the smallest total time; the fallback wins a tie."""
    fallback_first = sorted(times, key=lambda kernel: kernel != FALLBACK)
    return min(fallback_first, key=lambda kernel: sum(times[kernel].values()))


def read_choice(path: Path, setup: HeadSetup) -> str | None:
    """Return the stored kernel, or None if it was not measured for this setup."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        stored = {**content["measured"], "batches": tuple(content["measured"]["batches"])}
        choice = str(content["choice"])
        if choice not in KERNELS:
            raise ValueError(f"unknown choice {choice!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: {error!r}; fix: delete the file, "
            "so that the next start repeats the measurement"
        ) from error
    return choice if stored == asdict(setup) else None


def save_fastest(path: Path, setup: HeadSetup, times: Times) -> str:
    """Save the times and the fastest kernel; return the kernel."""
    choice = select_fastest(times)
    content = {
        "about": "LM head times in microseconds: medians of CUDA-graph replays on this machine.",
        "measured": asdict(setup),
        "us": {
            kernel: {str(batch): us for batch, us in row.items()} for kernel, row in times.items()
        },
        "choice": choice,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
    return choice


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


def read_table() -> dict[str, tuple[Tile, ...]]:
    """Return the tiles for each compute capability (such as ``"12.1"``) and for ``"default"``.

    Every tile is correct for any batch and shape; only speed differs.
    """
    table = json.loads(Path(__file__).with_name("tiles.json").read_text())["tiles"]
    return {name: tuple(Tile(**tile) for tile in tiles) for name, tiles in table.items()}


def tiles_for(capability: tuple[int, int], table: Mapping[str, Sequence[Tile]]) -> Sequence[Tile]:
    return table.get(f"{capability[0]}.{capability[1]}", table["default"])


def tile_for(batch: int, tiles: Sequence[Tile]) -> Tile:
    return next(tile for tile in tiles if tile.max_batch is None or batch <= tile.max_batch)
