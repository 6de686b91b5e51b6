"""Block scales of FP8 modules, looked at before any weight is loaded: each is a size, so positive.

A negative scale turns its block of weights round, and one that is far too large drowns all others;
both load, and every number stays finite. Scales of INT4 weights are not judged so: symmetric
AutoRound gives a group the sign of its largest weight, and half of them are negative.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Iterator
from pathlib import Path

from spark_vllm.checkpoint import names
from spark_vllm.checkpoint.headers import Tensor, Tree
from spark_vllm.checkpoint.settings import Settings

OUTSIDE = 1000
"""How many times the usual scale of its module a block may have."""

_FORMATS = {"F16": "e", "F32": "f"}


def scale_problems(directory: Path, tree: Tree, settings: Settings) -> Iterator[str]:
    """Yield the FP8 modules with a scale that no quantiser writes."""
    weight_part = names.FP8_WEIGHT if settings.overlay else "weight"
    scale_part = names.FP8_SCALE if settings.overlay else "weight_scale_inv"
    for module in settings.fp8_modules:
        scale = tree.tensors.get(f"{module}.{scale_part}")
        weight = tree.tensors.get(f"{module}.{weight_part}")
        if scale and weight and len(scale.shape) == len(weight.shape) == 2:
            said = _problem(directory, weight, scale, settings.block_shape)
            if said:
                yield f"{scale.file}: {module}.{scale_part}: {said}"


def _problem(directory: Path, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> str | None:
    values = _floats(directory, scale)
    bad = [value for value in values if not (math.isfinite(value) and value > 0)]
    if bad:
        return f"scale {bad[0]:g} of {len(bad)} of {len(values)} blocks, each has to be above zero"
    most = OUTSIDE * statistics.median(values)
    columns = scale.shape[1]
    for place, value in enumerate(values):
        # A block of zeros may have any scale.
        if value > most and _holds_weights(directory, weight, divmod(place, columns), block):
            return f"scale {value:g} is over {OUTSIDE} times the usual one of its module"
    return None


def _floats(directory: Path, tensor: Tensor) -> list[float]:
    data = _read(directory, tensor, 0, tensor.size_bytes)
    if tensor.dtype == "BF16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    code = _FORMATS.get(tensor.dtype, "f")
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def _holds_weights(
    directory: Path, weight: Tensor, at: tuple[int, int], block: tuple[int, int]
) -> bool:
    rows, columns = weight.shape
    first, left = at[0] * block[0], at[1] * block[1]
    width = min(block[1], columns - left)
    lines = (
        _read(directory, weight, row * columns + left, width)
        for row in range(first, min(first + block[0], rows))
    )
    return any(code & 0x7F for line in lines for code in line)


def _read(directory: Path, tensor: Tensor, start: int, length: int) -> bytes:
    with (directory / tensor.file).open("rb") as stream:
        stream.seek(tensor.start_bytes + start)
        return stream.read(length)
