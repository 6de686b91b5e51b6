"""Trained weights in exact BF16.

High and low bytes are separate planes, because high bytes compress well: 14.6 MB instead of 16.4.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lab.model.original import Floats
from lab.model.rounding import bf16_values

HERE = Path(__file__).parent
NAME = "weights.npz"


def write(directory: Path, bits: Mapping[str, npt.NDArray[np.uint16]]) -> Path:
    planes = {
        name: np.stack([values >> 8, values & 0xFF]).astype(np.uint8)
        for name, values in bits.items()
    }
    path = directory / NAME
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        np.savez_compressed(out, allow_pickle=False, **planes)
    part.rename(path)
    return path


def read(directory: Path = HERE) -> dict[str, Floats]:
    with np.load(directory / NAME, allow_pickle=False) as stored:
        planes = {name: stored[name].astype(np.uint16) for name in stored.files}
    return {name: bf16_values(high << 8 | low) for name, (high, low) in planes.items()}
