"""Choose the kernel of the opt-in INT8 head from measured times, and the tokens of drafts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

KERNELS = ("own", "marlin", "bf16")
FALLBACK = "marlin"
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
    """Return the ``count`` token ids that drafts are chosen from, sorted.

    Ids of a BPE vocabulary are in the order of its merges, so low ids are frequent. Added tokens,
    such as the end of a turn, have the highest ids and are included.
    """
    file = tokenizer / "tokenizer.json"
    added = json.loads(file.read_text("utf-8"))["added_tokens"] if file.exists() else []
    special = {token["id"] for token in added if token["id"] < vocabulary}
    others = [token for token in range(vocabulary) if token not in special]
    return sorted([*special, *others[: max(0, count - len(special))]])


def select_fastest(times: Times) -> str:
    """Return the kernel with the smallest sum over the batches; the fallback wins a tie."""
    fallback_first = sorted(times, key=lambda kernel: kernel != FALLBACK)
    return min(fallback_first, key=lambda kernel: sum(times[kernel].values()))


def read_choice(path: Path, setup: HeadSetup) -> str | None:
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
            f"{path}: {error!r}; fix: delete the file, so that the next start measures again"
        ) from error
    return choice if stored == asdict(setup) else None


def save_fastest(path: Path, setup: HeadSetup, times: Times) -> str:
    """Save the times and the fastest kernel; return the kernel."""
    choice = select_fastest(times)
    content = {
        "about": "Microseconds of the LM head, medians of CUDA-graph replays on this machine.",
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


def describe_times(times: Times, batches: Sequence[int]) -> str:
    return "; ".join(
        f"{kernel} {', '.join(f'{row[batch]:.0f}' for batch in batches)}"
        for kernel, row in times.items()
    )
