"""Checkpoints of drafts: trained, random, and trained with a number that is NaN."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from lab.model import rounding
from lab.model.original import Floats
from lab.model.safetensors import write_file
from proofs.drafts.shape import DRAFTS, config, shapes
from proofs.recall import weights

HERE = Path(__file__).parent
RANDOM_SEED = 7
SPOILT_TENSOR = "norm.weight"
"""A norm: matrices are packed away by the engine's CPU build before the plugin can look at them."""


def make_drafts(out: Path, target: Path) -> None:
    for kind in DRAFTS:
        found = trained(kind)
        write(out / f"tiny-{kind}", kind, target, found)
        write(out / f"tiny-{kind}-random", kind, target, untrained(kind))
        spoilt = found | {SPOILT_TENSOR: found[SPOILT_TENSOR].copy()}
        spoilt[SPOILT_TENSOR][3] = np.nan
        write(out / f"tiny-{kind}-nan", kind, target, spoilt)


def trained(kind: str, directory: Path = HERE) -> dict[str, Floats]:
    """Return the weights that lie below this directory.

    Raises:
        ValueError: They are those of another draft than the one described.
    """
    found = weights.read(directory / kind)
    sizes = {name: values.shape for name, values in found.items()}
    if sizes != shapes(kind):
        other = sorted(set(sizes.items()) ^ set(shapes(kind).items()))[:3]
        raise ValueError(f"the stored {kind} draft is another: {other}")
    return found


def untrained(kind: str) -> dict[str, Floats]:
    """Return random weights of the same shapes."""
    source = np.random.default_rng(RANDOM_SEED)
    return {
        name: np.ones(size, np.float32)
        if "norm" in name
        else source.normal(0, 0.02, size).astype(np.float32)
        for name, size in shapes(kind).items()
    }


def write(out: Path, kind: str, target: Path, tensors: dict[str, Floats]) -> None:
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config(kind), indent=1))
    write_file(
        out / "model.safetensors", {name: rounding.bf16(part) for name, part in tensors.items()}
    )
    for path in target.glob("*token*"):
        shutil.copy(path, out)
