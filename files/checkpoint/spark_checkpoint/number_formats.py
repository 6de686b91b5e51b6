"""Convert tensor bytes to numbers and back: BF16, e4m3 with block scales, packed INT8 and INT4.

e4m3 is safetensors' F8_E4M3: exponent bias 7, largest value 448, no infinities, 0x7F and 0xFF are
NaN (OCP 8-bit floating point, revision 1.0). All platforms produce the same bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spark_checkpoint.errors import ValidationError

Floats = NDArray[np.float32]
Words = NDArray[np.uint16]
Codes = NDArray[np.uint8]

E4M3_MAX = 448.0


def to_floats(raw: bytes, dtype: str, shape: tuple[int, ...]) -> Floats:
    if dtype == "BF16":
        values = from_bf16_bits(np.frombuffer(raw, "<u2"))
    elif dtype in ("F16", "F32"):
        values = np.frombuffer(raw, "<f2" if dtype == "F16" else "<f4").astype(np.float32)
    else:
        fix = "use a checkpoint with BF16, F16 or F32 weights"
        raise ValidationError("tensor", f"has dtype {dtype}, not a float of 16 or 32 bits", fix)
    return values.reshape(shape)


def bf16_bits(values: Floats) -> Words:
    """Round float32 to BF16 bits, to nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return rounded.astype("<u2")


def from_bf16_bits(bits: Words) -> Floats:
    words = bits.astype(np.uint32)
    words <<= 16
    return words.view(np.float32)


@cache
def _e4m3_values() -> Floats:
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
    """Round float32 of magnitude up to 448 to e4m3 codes, to nearest, ties to even."""
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Keep 3 mantissa bits; float32 has bias 127, e4m3 has 7.
    rounded = (magnitude + np.uint32(0x7FFFF) + ((magnitude >> 20) & 1)) >> 20
    normal = np.minimum(rounded.astype(np.int32) - ((127 - 7) << 3), 0x7E)
    small = np.rint(np.abs(values) * np.float32(512)).astype(np.int32)
    codes = np.where(np.abs(values) < np.float32(2.0**-6), small, normal).astype(np.uint8)
    return codes | (bits >> 24).astype(np.uint8) & np.uint8(0x80)


def repeat_scales(scales: Floats, shape: tuple[int, int], block: tuple[int, int]) -> Floats:
    """Repeat block scales for each element of a ``shape`` matrix."""
    rows = np.repeat(scales, block[0], axis=0)[: shape[0]]
    return np.repeat(rows, block[1], axis=1)[:, : shape[1]]


def dequantise(codes: Codes, scales: Floats, block: tuple[int, int]) -> Floats:
    """Return FP8 block weights as float32: code value times block scale."""
    result: Floats = from_e4m3(codes)
    result *= repeat_scales(scales, (codes.shape[0], codes.shape[1]), block)
    return result


def reduce_blocks(function: np.ufunc, values: Floats, block: tuple[int, int]) -> Floats:
    rows = function.reduceat(values, range(0, values.shape[0], block[0]), axis=0)
    reduced: Floats = function.reduceat(rows, range(0, values.shape[1], block[1]), axis=1)
    return reduced


def quantise_blocks(weights: Floats, block: tuple[int, int]) -> tuple[Codes, Words]:
    """Return e4m3 codes and BF16 scale bits.

    Codes use the stored scale, so rounding it adds no error.
    """
    largest = reduce_blocks(np.maximum, np.abs(weights), block)
    scales = bf16_bits(np.where(largest > 0, largest / np.float32(E4M3_MAX), np.float32(1)))
    stored = repeat_scales(from_bf16_bits(scales), (weights.shape[0], weights.shape[1]), block)
    scaled = np.clip(weights / stored, -np.float32(E4M3_MAX), np.float32(E4M3_MAX))
    return to_e4m3(scaled), scales


# Packed weight ``[out, in]`` with ``pack = 32 / bits`` codes in a word: ``qweight`` I32 ``[in /
# pack, out]`` has ``code + 2 ** (bits - 1)``, lowest bits first along the input; ``scales`` BF16
# ``[in / group, out]``; ``qzeros`` I32 ``[in / group, out / pack]`` is required by the loader but
# unused for symmetric quantisation (vLLM 0.33 ``uint4b8``, ``uint8b128``; GPTQ stores zero point
# minus one).
GROUP = 128
WORD_BITS = 32
# Rounding to 16 levels in groups of 128 changes a weight by about 0.1 (root mean square); another
# weight differs by more than 1.
INT4_LIMIT = 0.25
ZERO_POINT_BYTES = {4: 0x77, 8: 0x7F}
# Steps on the BF16 grid around largest / 127 or / 7; the first best step wins. Beyond the last one
# clipping cost more than the finer grid gained (INT8: always; INT4: for normal distributions).
_STEPS = {4: tuple(range(0, -64, -8)), 8: (0, 1, -1, -2, -3, -4, -5, -6)}


class PackedRows(NamedTuple):
    """Quantised rows; errors and power are sums of squares."""

    codes: Codes  # uint8, code + 2 ** (bits - 1), [rows, in]
    scales: Words  # BF16 bits, [rows, in / group]
    error: float
    error_by_maximum: float
    power: float


def quantise_rows(weights: Floats, bits: int) -> PackedRows:
    """Quantise rows; the scale of a group is the BF16 value of least squared error."""
    zero = 1 << (bits - 1)
    grouped = weights.reshape(weights.shape[0], -1, GROUP)
    largest = np.abs(grouped).max(axis=2)
    smallest_scale = np.float32(2.0**-126)
    first = bf16_bits(np.maximum(largest / np.float32(zero - 1), smallest_scale)).astype(np.int32)
    errors = []
    best_error = np.full(largest.shape, np.inf, np.float32)
    best = first.copy()
    for step in _STEPS[bits]:
        candidate = np.maximum(first + step, 0x80)
        error = _group_errors(grouped, from_bf16_bits(candidate.astype(np.uint16)), zero)
        errors.append(error)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best = np.where(better, candidate, best)
    scales = np.where(largest > 0, best, 0x3F80).astype("<u2")
    codes = _codes(grouped, from_bf16_bits(scales), zero).astype(np.int16) + zero
    return PackedRows(
        codes.astype(np.uint8).reshape(weights.shape),
        scales,
        float(best_error.sum(dtype=np.float64)),
        float(errors[0].sum(dtype=np.float64)),
        float(np.square(weights, dtype=np.float64).sum()),
    )


def packed_bytes(shape: tuple[int, ...], bits: int) -> int:
    """Return the bytes of ``qweight``, ``scales`` and ``qzeros`` of a weight."""
    outputs, inputs = shape
    groups = inputs // GROUP
    return outputs * (inputs * bits // 8 + groups * 2 + groups * bits // 8)


def pack_rows(codes: Codes, bits: int) -> Any:
    """Return the columns of ``qweight`` for these rows: uint32 ``[in * bits / 32, rows]``."""
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return np.ascontiguousarray(codes.view("<u4").T)


def unpack_int4(words: bytes, scales: Floats) -> Floats:
    """Return a packed INT4 weight as float32 ``[out, in]``; scales are ``[in / group, out]``."""
    codes = np.frombuffer(words, "<u4").reshape(-1, 1, scales.shape[1])
    nibbles = codes >> np.arange(0, WORD_BITS, 4, dtype=np.uint32)[None, :, None] & 15
    levels = nibbles.reshape(-1, scales.shape[1]).astype(np.float32) - np.float32(8)
    weight: Floats = levels * np.repeat(scales, GROUP, axis=0)
    return weight.T


def relative_error(weight: Floats, rounded: Floats) -> float:
    """Return root of squared error over squared weight."""
    power = float(np.square(weight, dtype=np.float64).sum())
    lost = float(np.square(rounded - weight, dtype=np.float64).sum())
    return (lost / power) ** 0.5 if power else float(lost > 0)


def _codes(grouped: Any, scales: Any, zero: int) -> Any:
    return np.clip(np.rint(grouped / scales[:, :, None]), -zero, zero - 1)


def _group_errors(grouped: Any, scales: Any, zero: int) -> Any:
    """Return squared errors per group, summed in a fixed order."""
    error = np.square(_codes(grouped, scales, zero) * scales[:, :, None] - grouped)
    width = error.shape[2]
    while width > 1:
        width //= 2
        error = error[:, :, :width] + error[:, :, width:]
    return error[:, :, 0]
