"""Choose the kernel of the opt-in INT8 head from times measured once on this machine."""

# The times file is valid for a device, driver, image, shape and set of batches. Without a valid
# file the head uses Marlin, like a head that is INT8 in the checkpoint.

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

WAYS = ("own", "marlin", "bf16")
FALLBACK = "marlin"
IMAGE_VARIABLE = "SPARK_IMAGE"
"""Environment variable with the image digest; the plan sets it if the head is measured."""

Times = Mapping[str, Mapping[int, float]]
"""Microseconds of each kernel at each batch."""


@dataclass(frozen=True)
class Measured:
    device: str
    driver: str
    image: str
    rows: int
    in_features: int
    batches: tuple[int, ...]


def head_batches(max_sequences: int, drafts: int) -> tuple[int, ...]:
    """Return the batch sizes of the head: 1 to ``max_sequences`` times a token and the drafts."""
    return tuple(count * (1 + drafts) for count in range(1, max_sequences + 1))


def fastest(times: Times) -> str:
    """Return the kernel with the smallest sum over the batches; the fallback wins a tie."""
    order = sorted(times, key=lambda way: way != FALLBACK)
    return min(order, key=lambda way: sum(times[way].values()))


def read_choice(path: Path, wanted: Measured) -> str | None:
    """Return the kernel stored for exactly this machine and shape; ``None``: measure.

    Raises:
        ValueError: when the file is damaged.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        found = {**content["measured"], "batches": tuple(content["measured"]["batches"])}
        choice = str(content["choice"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: {error!r}; fix: delete the file; the next start measures again"
        ) from error
    if choice not in WAYS:
        raise ValueError(
            f"{path}: choice {choice!r}; fix: delete the file; the next start measures again"
        )
    return choice if found == asdict(wanted) else None


def write_choice(path: Path, measured: Measured, times: Times) -> str:
    """Write times and choice, whole or not at all; returns the choice."""
    choice = fastest(times)
    content = {
        "about": "Microseconds of the LM head, medians of CUDA-graph replays on this machine.",
        "measured": asdict(measured),
        "us": {way: {str(batch): us for batch, us in row.items()} for way, row in times.items()},
        "choice": choice,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
    return choice


def describe(times: Times, batches: Sequence[int]) -> str:
    return "; ".join(
        f"{way} {', '.join(f'{times[way][batch]:.0f}' for batch in batches)}" for way in times
    )
