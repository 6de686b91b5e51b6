"""The trained weights, stored next to this file.

INT4 weights are stored as codes and scales, FP8 weights exactly, the rest as BF16: rounding them
again gives the same bytes. The vision tower is not stored.
"""

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
    weights = original.random_weights(shape, VISION_SEED)
    with np.load(path) as stored:
        names = {name for name in stored.files if not name.endswith(_SCALES)} - {"recipe"}
        trained = {name: _values(stored, name) for name in names}
    expected = {
        name: values.shape for name, values in weights.items() if not name.startswith(VISION)
    }
    if {name: values.shape for name, values in trained.items()} != expected:
        raise LabError(str(path), "contains another model", "rebuild it: make lab-model")
    return weights | trained


def _values(stored: Mapping[str, Any], name: str) -> Floats:
    values = stored[name]
    if original.is_int4(name):
        return rounding.int4_values(values, stored[name + _SCALES])
    return rounding.bf16_values(values) if values.dtype == np.uint16 else np.asarray(values)


def _is_exact(name: str, values: Floats) -> bool:
    """FP8 weights and norms, which `spread` rescales before rounding."""
    return values.ndim == 1 or (name.startswith(original.LAYERS) and ".shared_expert." in name)
