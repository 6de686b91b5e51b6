"""Packs a 16-bit weight as INT8, streaming rows: memory does not grow with the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from spark_checkpoint.build.staging import NewTensor, Staging, read_span
from spark_checkpoint.format.numbers import (
    GROUP,
    PACK,
    floats,
    pack_rows,
    quantise_rows,
    zero_points,
)
from spark_checkpoint.format.tree import Span, Tree
from spark_checkpoint.verify.gates import WEIGHT

# Weights quantised at once: their float32 copies stay in the processor's cache.
_CODE_WEIGHTS = 64 << 10
# Codes packed at once: longer rows of the packed weight mean fewer writes.
_BLOCK_BYTES = 3 << 20


class Packed(NamedTuple):
    """The three tensors of a packed weight, and its relative errors."""

    tensors: list[NewTensor]
    error: float
    error_by_maximum: float


def pack_weight(
    base: Tree, name: str, stage: Staging, on_bytes: Callable[[int], None], workers: int
) -> Packed:
    """Quantise the base's weight ``name`` and stage ``qweight``, ``scales`` and ``qzeros``.

    ``workers`` quantise blocks of rows; ``on_bytes`` is told about source bytes that are done.
    """
    outputs, inputs = base.tensor(name).shape
    dtype, span = base.tensor(name).dtype, base.span(name)
    qweight = stage.reserve(outputs * inputs)
    scales = np.empty((inputs // GROUP, outputs), "<u2")
    code_rows = max(1, _CODE_WEIGHTS // inputs)
    block_rows = max(code_rows, _BLOCK_BYTES // inputs // code_rows * code_rows)

    def one(first: int) -> Any:
        count = min(block_rows, outputs - first)
        codes = np.empty((count, inputs), np.uint8)
        sums = np.zeros(3)
        for row in range(0, count, code_rows):
            taken = min(code_rows, count - row)
            start = span.offset + (first + row) * inputs * 2
            raw = read_span(Span(span.path, start, taken * inputs * 2))
            rows = quantise_rows(floats(raw, dtype, (taken, inputs)))
            codes[row : row + taken] = rows.codes
            scales[:, first + row : first + row + taken] = rows.scales.T
            sums += (rows.error, rows.error_by_maximum, rows.power)
            on_bytes(len(raw))
        for line, packed in enumerate(pack_rows(codes)):
            stage.write(qweight, (line * outputs + first) * PACK, packed.data)
        return sums

    with ThreadPoolExecutor(workers) as pool:
        error, by_maximum, power = sum(pool.map(one, range(0, outputs, block_rows)))
    module, groups = name.removesuffix(WEIGHT), inputs // GROUP
    # Group by group: those of a large head are 8 MB.
    one_group = zero_points(outputs, GROUP)
    zeros = stage.reserve(groups * len(one_group))
    for group in range(groups):
        stage.write(zeros, group * len(one_group), one_group)
    tensors = [
        NewTensor(f"{module}.qweight", "I32", (inputs // PACK, outputs), qweight),
        NewTensor(f"{module}.scales", "BF16", (groups, outputs), stage.append(scales.data)),
        NewTensor(f"{module}.qzeros", "I32", (groups, outputs // PACK), zeros),
    ]
    divisor = power if power else 1.0
    return Packed(tensors, float((error / divisor) ** 0.5), float((by_maximum / divisor) ** 0.5))
