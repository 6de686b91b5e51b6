"""Number formats: BF16, e4m3 with block scales, packed INT8 and INT4; compare FP8 with the base.

e4m3 is F8_E4M3 of safetensors (OCP 8-bit floating point, revision 1.0): exponent bias 7, maximum
448, no infinities; 0x7F and 0xFF are NaN. The results are identical on all platforms.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spark_checkpoint import ValidationError
from spark_checkpoint.directory import Checkpoint, read_span
from spark_checkpoint.headers import tensor_bytes

Floats = NDArray[np.float32]
Words = NDArray[np.uint16]
Codes = NDArray[np.uint8]

E4M3_MAX = 448.0
_NUMPY_DTYPES = {"F16": "<f2", "F32": "<f4"}


def to_floats(raw: bytes, dtype: str, shape: tuple[int, ...]) -> Floats:
    if dtype == "BF16":
        return from_bf16_bits(np.frombuffer(raw, "<u2")).reshape(shape)
    if dtype not in _NUMPY_DTYPES:
        fix = "use a checkpoint with BF16, F16 or F32 weights"
        raise ValidationError("tensor", f"has the dtype {dtype}, expected BF16, F16 or F32", fix)
    return np.frombuffer(raw, _NUMPY_DTYPES[dtype]).astype(np.float32).reshape(shape)


def bf16_bits(values: Floats) -> Words:
    """Round float32 values to the nearest BF16 (ties to even); return the bits."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return rounded.astype("<u2")


def from_bf16_bits(bits: Words) -> Floats:
    words = bits.astype(np.uint32)
    words <<= 16
    return words.view(np.float32)


@cache
def _e4m3_values() -> Floats:
    """Return the values of all 256 codes."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(
        exponent == 0,
        mantissa * 2.0**-9,
        (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7),
    )
    values = np.where(codes & 0x80, -values, values)
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)


def from_e4m3(codes: Codes) -> Floats:
    # mode="clip" skips the bounds check.
    return _e4m3_values().take(codes, mode="clip")


def to_e4m3(values: Floats) -> Codes:
    """Round float32 values of up to ±448 to the nearest e4m3 codes, ties to even."""
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Keep 3 mantissa bits; float32 has bias 127, e4m3 has 7.
    rounded = (magnitude + np.uint32(0x7FFFF) + ((magnitude >> 20) & 1)) >> 20
    normal = np.minimum(rounded.astype(np.int32) - ((127 - 7) << 3), 0x7E)
    subnormal = np.rint(np.abs(values) * np.float32(512)).astype(np.int32)
    codes = np.where(np.abs(values) < np.float32(2.0**-6), subnormal, normal).astype(np.uint8)
    return codes | (bits >> 24).astype(np.uint8) & np.uint8(0x80)


def repeat_scales(scales: Floats, shape: tuple[int, int], block: tuple[int, int]) -> Floats:
    rows = np.repeat(scales, block[0], axis=0)[: shape[0]]
    return np.repeat(rows, block[1], axis=1)[:, : shape[1]]


def dequantize(codes: Codes, scales: Floats, block: tuple[int, int]) -> Floats:
    """Return FP8 weights as float32: each code's value times its block's scale."""
    result: Floats = from_e4m3(codes)
    result *= repeat_scales(scales, (codes.shape[0], codes.shape[1]), block)
    return result


def reduce_blocks(function: np.ufunc, values: Floats, block: tuple[int, int]) -> Floats:
    rows = function.reduceat(values, range(0, values.shape[0], block[0]), axis=0)
    reduced: Floats = function.reduceat(rows, range(0, values.shape[1], block[1]), axis=1)
    return reduced


def quantize_blocks(weights: Floats, block: tuple[int, int]) -> tuple[Codes, Words]:
    """Return e4m3 codes, and scales as BF16 bits.

    Codes are computed with the rounded scale, so that rounding the scale adds no error.
    """
    limit = np.float32(E4M3_MAX)
    scale = reduce_blocks(np.maximum, np.abs(weights), block) / limit
    # The plugin rejects a scale of zero, to which a smaller scale could round.
    scale_bits = bf16_bits(np.where(scale >= np.float32(2.0**-126), scale, np.float32(1)))
    scales = repeat_scales(from_bf16_bits(scale_bits), (weights.shape[0], weights.shape[1]), block)
    return to_e4m3(np.clip(weights / scales, -limit, limit)), scale_bits


# A packed weight consists of
# - ``qweight``: words of codes ``code + 2 ** (bits - 1)``, lowest bits first;
# - ``scales`` of groups of inputs;
# - ``qzeros``: zero points minus one, as in GPTQ; required by the loader of vLLM 0.33, but unused
#   for symmetric quantization (``uint4b8``, ``uint8b128``).
GROUP = 128
WORD_BITS = 32
# Maximum relative error. Rounding to INT4 in groups of 128 causes about 0.1; comparing with the
# wrong weight gives more than 1.
INT4_LIMIT = 0.25
ZERO_POINT_BYTES = {4: 0x77, 8: 0x7F}
# Candidate scales, in BF16 steps from largest / 127 or largest / 7; the first of equal candidates
# wins. Even smaller scales would clip more than they gain: for INT8 always, and for INT4 if weights
# are normally distributed.
_SCALE_STEPS = {4: tuple(range(0, -64, -8)), 8: (0, 1, -1, -2, -3, -4, -5, -6)}


class QuantizedRows(NamedTuple):
    codes: Codes
    scales: Words  # BF16 bits, [rows, in / group]
    squared_error: float
    squared_weights: float


def quantize_rows(weights: Floats, bits: int) -> QuantizedRows:
    """Quantize rows; each group gets the BF16 scale with the smallest squared error."""
    zero = 1 << (bits - 1)
    grouped = weights.reshape(weights.shape[0], -1, GROUP)
    largest = np.abs(grouped).max(axis=2)
    smallest_scale = np.float32(2.0**-126)
    smallest_bits, one_bits = 0x0080, 0x3F80  # BF16 bits of smallest_scale and 1.0
    scale = np.maximum(largest / np.float32(zero - 1), smallest_scale)
    scale_bits = bf16_bits(scale).astype(np.int32)
    best_error = np.full(largest.shape, np.inf, np.float32)
    best_bits = scale_bits.copy()
    for step in _SCALE_STEPS[bits]:
        candidate_bits = np.maximum(scale_bits + step, smallest_bits)
        error = _group_errors(grouped, from_bf16_bits(candidate_bits.astype(np.uint16)), zero)
        is_better = error < best_error
        best_error = np.where(is_better, error, best_error)
        best_bits = np.where(is_better, candidate_bits, best_bits)
    scales = np.where(largest > 0, best_bits, one_bits).astype("<u2")
    codes = _round_to_codes(grouped, from_bf16_bits(scales), zero).astype(np.int16) + zero
    return QuantizedRows(
        codes.astype(np.uint8).reshape(weights.shape),
        scales,
        float(best_error.sum(dtype=np.float64)),
        float(np.square(weights, dtype=np.float64).sum()),
    )


def packed_tensors(shape: tuple[int, ...], bits: int) -> dict[str, tuple[str, tuple[int, int]]]:
    """Map suffixes of a packed weight's tensors to their dtypes and shapes."""
    (outputs, inputs), codes_per_word = shape, WORD_BITS // bits
    return {
        ".qweight": ("I32", (inputs // codes_per_word, outputs)),
        ".scales": ("BF16", (inputs // GROUP, outputs)),
        ".qzeros": ("I32", (inputs // GROUP, outputs // codes_per_word)),
    }


def packed_bytes(shape: tuple[int, ...], bits: int) -> int:
    return sum(tensor_bytes(dtype, part) for dtype, part in packed_tensors(shape, bits).values())


def pack_rows(codes: Codes, bits: int) -> Any:
    """Return the columns of ``qweight`` for these rows: uint32 ``[in * bits / 32, rows]``."""
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return np.ascontiguousarray(codes.view("<u4").T)


def read_floats(checkpoint: Checkpoint, name: str) -> Floats:
    tensor = checkpoint.tensor(name)
    return to_floats(read_span(checkpoint.span(name)), tensor.dtype, tensor.shape)


def unpack_int4(checkpoint: Checkpoint, module: str) -> Floats:
    """Return a packed INT4 weight as float32 ``[out, in]``."""
    scales = read_floats(checkpoint, f"{module}.scales")  # [in / group, out]
    words = read_span(checkpoint.span(f"{module}.qweight"))
    codes = np.frombuffer(words, "<u4").reshape(-1, 1, scales.shape[1])
    nibbles = codes >> np.arange(0, WORD_BITS, 4, dtype=np.uint32)[None, :, None] & 15
    levels = nibbles.reshape(-1, scales.shape[1]).astype(np.float32) - np.float32(8)
    weight: Floats = levels * np.repeat(scales, GROUP, axis=0)
    return weight.T


def relative_error(weight: Floats, rounded: Floats) -> float:
    squared_weight = float(np.square(weight, dtype=np.float64).sum())
    squared_error = float(np.square(rounded - weight, dtype=np.float64).sum())
    return (squared_error / squared_weight) ** 0.5 if squared_weight else float(squared_error > 0)


def _round_to_codes(grouped: Any, scales: Any, zero: int) -> Any:
    return np.clip(np.rint(grouped / scales[:, :, None]), -zero, zero - 1)


def _group_errors(grouped: Any, scales: Any, zero: int) -> Any:
    """Return the squared error of each group, summed in the same order on all platforms."""
    error = np.square(_round_to_codes(grouped, scales, zero) * scales[:, :, None] - grouped)
    width = error.shape[2]
    while width > 1:
        width //= 2
        error = error[:, :, :width] + error[:, :, width:]
    return error[:, :, 0]


# Relative error: half a step of 3 mantissa bits, and rounding of the scale to BF16.
_RELATIVE_ROUNDING = 2.0**-4 + 2.0**-7
# Absolute error in units of the block's scale: half the smallest step, and rounding of the scale.
_ABSOLUTE_ROUNDING = 2.0**-10 * (1 + 2.0**-3)
# Blocks of a row to compare at once; float32 copies of them fit in the processor's cache.
_BLOCKS_AT_ONCE = 8
# Limits of a block scale relative to the median of the same module in all experts and layers; the
# plugin has the same limits.
_MIN_RATIO, _MAX_RATIO = 1 / 1024, 128


class Deviation(NamedTuple):
    module_error: float
    worst_block_error: float
    beyond_rounding: int  # number of elements whose error exceeds rounding


class Comparison:
    """Compares FP8 codes with float32 weights, by rows of blocks."""

    def __init__(self, scales: Floats, block: tuple[int, int]):
        self._scales, self._block = scales, block
        self._squared_errors: list[Any] = []
        self._squared_weights: list[Any] = []
        self._beyond_rounding = 0
        self.any_nonzero = False
        self.any_nan = False

    def add(self, weights: Floats, codes: Codes) -> None:
        """Compare the next row of blocks."""
        scales, width = self._scales[len(self._squared_errors)], self._block[1]
        squared_errors: list[Any] = []
        squared_weights: list[Any] = []
        for first in range(0, len(scales), _BLOCKS_AT_ONCE):
            columns = slice(first * width, (first + _BLOCKS_AT_ONCE) * width)
            part = weights[:, columns]
            scale = np.repeat(scales[first : first + _BLOCKS_AT_ONCE], width)[: part.shape[1]]
            squared_error, squared_weight = self._compare(part, codes[:, columns], scale)
            squared_errors.append(squared_error)
            squared_weights.append(squared_weight)
        self._squared_errors.append(np.concatenate(squared_errors))
        self._squared_weights.append(np.concatenate(squared_weights))

    def _compare(self, weights: Floats, codes: Codes, scale: Floats) -> tuple[Any, Any]:
        """Count elements beyond rounding; return squared errors and weights, summed by block."""
        # Work in place, because allocating large arrays takes longer than the arithmetic.
        error, magnitude = from_e4m3(codes), np.abs(weights)
        error *= scale
        error -= weights
        np.abs(error, out=error)
        allowed = np.maximum(
            magnitude * np.float32(_RELATIVE_ROUNDING), scale * np.float32(_ABSOLUTE_ROUNDING)
        )
        self._beyond_rounding += int(error.size - np.count_nonzero(error <= allowed))
        self.any_nonzero = self.any_nonzero or bool(codes.any())
        self.any_nan = self.any_nan or bool(((codes & 0x7F) == 0x7F).any())
        return (
            reduce_blocks(np.add, np.square(error, out=error), self._block)[0],
            reduce_blocks(np.add, np.square(magnitude, out=magnitude), self._block)[0],
        )

    def deviation(self) -> Deviation:
        squared_errors = np.array(self._squared_errors, np.float64)
        squared_weights = np.array(self._squared_weights, np.float64)
        is_zero = squared_weights == 0
        by_block = np.sqrt(squared_errors / np.where(is_zero, 1, squared_weights))
        worst_block = float(np.where(is_zero & (squared_errors > 0), np.inf, by_block).max())
        total = squared_weights.sum()
        module_error = float(np.sqrt(squared_errors.sum() / total)) if total > 0 else worst_block
        return Deviation(module_error, worst_block, self._beyond_rounding)


def check_outliers(deviations: Mapping[str, Deviation]) -> None:
    """Raise ValidationError if only a few modules have elements beyond rounding.

    Such a file is damaged: slightly different weights would affect nearly every module.
    """
    damaged = {
        module: deviation.beyond_rounding
        for module, deviation in deviations.items()
        if deviation.beyond_rounding
    }
    if not damaged or len(damaged) * 10 > len(deviations):
        return
    module, count = max(damaged.items(), key=lambda item: item[1])
    problem = (
        f"{count} elements of the FP8 source differ from the base by more than rounding error; "
        f"only {len(damaged)} of {len(deviations)} modules differ, so the file is damaged"
    )
    raise ValidationError(module, problem, "download the FP8 source again")


def check_scale_sizes(scales: Mapping[str, Floats]) -> None:
    """Raise ValidationError for implausible scales; ``scales`` maps weights to scales in use."""
    groups: dict[str, dict[str, Floats]] = defaultdict(dict)
    for name, values in scales.items():
        groups[re.sub(r"\.\d+\.", ".N.", name)][name] = values
    for group in groups.values():
        median = float(np.median(np.concatenate(list(group.values()))))
        for name, values in group.items():
            wrong = values[(values < _MIN_RATIO * median) | (values > _MAX_RATIO * median)]
            if wrong.size:
                problem = (
                    f"has a scale of {wrong[0]:g}, but the median of similar modules is {median:g}"
                )
                fix = "download the FP8 source again, or use the FP8 repository of the same model"
                raise ValidationError(f"donor {name}", problem, fix)
