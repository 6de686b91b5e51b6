"""Pack 16-bit weights as INT8 or INT4, as GPTQ does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from spark_checkpoint.build.write import NewTensor, Staging
from spark_checkpoint.directory import Span, read_span
from spark_checkpoint.errors import ValidationError
from spark_checkpoint.number_formats import (
    GROUP,
    INT4_LIMIT,
    WORD_BITS,
    ZERO_POINT_BYTES,
    pack_rows,
    packed_tensors,
    quantize_rows,
    relative_error,
    to_floats,
    unpack_int4,
)
from spark_checkpoint.tensor_sets import WEIGHT

_WEIGHTS_AT_ONCE = 64 << 10  # fits the processor's cache
# INT8 codes to pack at once: large blocks need few writes.
_BLOCK_BYTES = 3 << 20


class Packed(NamedTuple):
    tensors: list[NewTensor]
    error: float
    error_by_maximum: float


def pack_weight(
    weight: NewTensor, bits: int, stage: Staging, on_bytes: Callable[[int], None], workers: int
) -> Packed:
    name, dtype, (outputs, inputs), span = weight
    qweight = stage.reserve(outputs * inputs * bits // 8)
    scales = np.empty((inputs // GROUP, outputs), "<u2")
    code_rows = max(1, _WEIGHTS_AT_ONCE // inputs)
    block_rows = max(code_rows, _BLOCK_BYTES // inputs // code_rows * code_rows)

    def quantize_block(first: int) -> Any:
        count = min(block_rows, outputs - first)
        codes = np.empty((count, inputs), np.uint8)
        sums = np.zeros(3)
        for row in range(0, count, code_rows):
            row_count = min(code_rows, count - row)
            start = span.offset + (first + row) * inputs * 2
            raw = read_span(Span(span.path, start, row_count * inputs * 2))
            values = to_floats(raw, dtype, (row_count, inputs))
            if not np.isfinite(values).all():
                raise ValidationError(name, "has NaN or infinite values", "download the base again")
            rows = quantize_rows(values, bits)
            codes[row : row + row_count] = rows.codes
            scales[:, first + row : first + row + row_count] = rows.scales.T
            sums += (rows.error, rows.error_by_maximum, rows.power)
            on_bytes(len(raw))
        for line, packed in enumerate(pack_rows(codes, bits)):
            stage.write(qweight, (line * outputs + first) * WORD_BITS // 8, packed.data)
        return sums

    with ThreadPoolExecutor(workers) as pool:
        error, by_maximum, power = sum(pool.map(quantize_block, range(0, outputs, block_rows)))
    zeros = bytes([ZERO_POINT_BYTES[bits]]) * (inputs // GROUP * outputs * bits // 8)
    spans = (qweight, stage.append(scales.data), stage.append(zeros))
    parts = packed_tensors(weight.shape, bits).items()
    tensors = [
        NewTensor(name.removesuffix(WEIGHT) + suffix, part_dtype, shape, part_span)
        for (suffix, (part_dtype, shape)), part_span in zip(parts, spans, strict=True)
    ]
    divisor = power if power else 1.0
    return Packed(tensors, float((error / divisor) ** 0.5), float((by_maximum / divisor) ** 0.5))


def check_int4(weight: NewTensor, packed: Sequence[NewTensor]) -> float:
    """Return the relative error of a packed weight; raise ValidationError if it is too large."""
    qweight, scales, _ = packed
    source = to_floats(read_span(weight.span), weight.dtype, weight.shape)
    rounded = unpack_int4(
        read_span(qweight.span), to_floats(read_span(scales.span), scales.dtype, scales.shape)
    )
    error = relative_error(source, rounded)
    if not error <= INT4_LIMIT:
        raise ValidationError(
            weight.name,
            f"INT4 differs from the 16-bit weight by {error:.1%}, the limit is {INT4_LIMIT:.0%}",
            "set drafter: keep",
        )
    return error
