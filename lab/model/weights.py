"""The trained weights as they lie beside this file, so that nobody has to train them.

What the INT4 base rounds to INT4 is stored as its codes and scales, what the hybrid rounds to FP8
as it is, all else as BF16: rounded again, base and hybrid are those of the training, byte for byte.
The vision tower is not trained and not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lab.errors import LabError
from lab.model import original, rounding
from lab.model.original import Floats
from lab.model.shape import Shape

HERE = Path(__file__).parent
FILE = HERE / "weights.npz"
VISION, VISION_SEED = "model.visual.", 7  # as training fills it
_SCALES = "/scales"


def write(path: Path, weights: dict[str, Floats]) -> None:
    stored: dict[str, Any] = {}
    for name, values in weights.items():
        if original.is_int4(name):
            scales = rounding.int4_scales(values)
            stored[name] = rounding.int4_codes(values, scales)
            stored[name + _SCALES] = scales
        elif not name.startswith(VISION):
            stored[name] = values if _is_exact(name, values) else rounding.bf16_bits(values)
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        np.savez_compressed(out, allow_pickle=False, **stored)
    part.rename(path)


def read(shape: Shape, path: Path = FILE) -> dict[str, Floats]:
    """Every weight of the trained model.

    Raises:
        LabError: The file holds another model than the one of `shape`.
    """
    weights = original.random_weights(shape, VISION_SEED)
    with np.load(path) as stored:
        names = {name for name in stored.files if not name.endswith(_SCALES)} - {"recipe"}
        found = {name: _values(stored, name) for name in names}
    wanted = {name: values.shape for name, values in weights.items() if not name.startswith(VISION)}
    if {name: values.shape for name, values in found.items()} != wanted:
        raise LabError(str(path), "holds another model", "make it anew: make lab-model")
    return weights | found


def _values(stored: Mapping[str, Any], name: str) -> Floats:
    values = stored[name]
    if original.is_int4(name):
        return rounding.int4_values(values, stored[name + _SCALES])
    return rounding.bf16_values(values) if values.dtype == np.uint16 else np.asarray(values)


def _is_exact(name: str, values: Floats) -> bool:
    """Whether it is rounded later: what becomes FP8, and norms, which `spread` moves before."""
    return values.ndim == 1 or (name.startswith(original.LAYERS) and ".shared_expert." in name)
