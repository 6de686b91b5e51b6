"""Turns raw tensor bytes into numbers and back: BF16, e4m3 with block scales. Needs numpy.

e4m3 here is the finite kind of the safetensors dtype F8_E4M3: 4 exponent bits with bias 7,
largest value 448, no infinities, 0x7F and 0xFF are NaN (OCP 8-bit floating point, revision 1.0).
Every step is a single IEEE operation per element, so all platforms give the same bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spark_checkpoint.errors import GateRefused

Floats = NDArray[np.float32]
Words = NDArray[np.uint16]
Codes = NDArray[np.uint8]

E4M3_MAX = 448.0


def floats(raw: bytes, dtype: str, shape: tuple[int, ...]) -> Floats:
    """Return a tensor's bytes as float32."""
    if dtype == "BF16":
        words = np.frombuffer(raw, "<u2").astype(np.uint32)
        words <<= 16
        values = words.view(np.float32)
    elif dtype in ("F16", "F32"):
        values = np.frombuffer(raw, "<f2" if dtype == "F16" else "<f4").astype(np.float32)
    else:
        raise GateRefused("tensor", f"has dtype {dtype}, not a float of 16 or 32 bits", "check it")
    return values.reshape(shape)


def bf16_bits(values: Floats) -> Words:
    """Round float32 to BF16, to nearest, ties to even; returns the 16 bits."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return rounded.astype("<u2")


def from_bf16_bits(bits: Words) -> Floats:
    """Return BF16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


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
    """Return e4m3 codes as float32."""
    # A code is always inside the table; saying so spares a check of every element.
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


def spread(scales: Floats, shape: tuple[int, int], block: tuple[int, int]) -> Floats:
    """Repeat block scales so that each element of a ``shape`` matrix has its own."""
    rows = np.repeat(scales, block[0], axis=0)[: shape[0]]
    return np.repeat(rows, block[1], axis=1)[:, : shape[1]]


def dequantise(codes: Codes, scales: Floats, block: tuple[int, int]) -> Floats:
    """Return what FP8 block weights stand for: code value times the scale of its block."""
    result: Floats = from_e4m3(codes)
    result *= spread(scales, (codes.shape[0], codes.shape[1]), block)
    return result


def block_sums(values: Floats, block: tuple[int, int]) -> Floats:
    """Return the sum of each block; blocks at the edges may be smaller."""
    rows = np.add.reduceat(values, range(0, values.shape[0], block[0]), axis=0)
    return np.add.reduceat(rows, range(0, values.shape[1], block[1]), axis=1)


def block_maxima(values: Floats, block: tuple[int, int]) -> Floats:
    rows = np.maximum.reduceat(values, range(0, values.shape[0], block[0]), axis=0)
    return np.maximum.reduceat(rows, range(0, values.shape[1], block[1]), axis=1)


def quantise_blocks(weights: Floats, block: tuple[int, int]) -> tuple[Codes, Words]:
    """Return e4m3 codes and BF16 scale bits; the largest of a block becomes about 448.

    The codes are made with the scale as it is stored, so its rounding costs nothing.
    """
    largest = block_maxima(np.abs(weights), block)
    scales = bf16_bits(np.where(largest > 0, largest / np.float32(E4M3_MAX), np.float32(1)))
    stored = spread(from_bf16_bits(scales), (weights.shape[0], weights.shape[1]), block)
    scaled = np.clip(weights / stored, -np.float32(E4M3_MAX), np.float32(E4M3_MAX))
    return to_e4m3(scaled), scales


# For a weight ``[out, in]``: ``qweight`` I32 ``[in / 4, out]`` holds ``code + 128`` bytes, low
# byte first along the input; ``scales`` BF16 ``[in / group, out]``; ``qzeros`` I32 ``[in / group,
# out / 4]`` is there because the loader wants it, its content is not used when the quantisation
# is symmetric (vLLM 0.33 ``uint8b128``; GPTQ stores zero point minus one).


GROUP = 128
PACK = 4
ZERO_POINT_BYTE = 0x7F
# Steps on the BF16 grid around largest / 127, tried in this order; the first best one wins.
# Below -6 steps (2 to 5 % less) clipping always cost more than the finer grid gained.
_STEPS = (0, 1, -1, -2, -3, -4, -5, -6)


class Int8Rows(NamedTuple):
    """Quantised rows and what they lost, as sums of squares."""

    codes: Codes  # uint8, code + 128, [rows, in]
    scales: Words  # BF16 bits, [rows, in / group]
    error: float
    error_by_maximum: float
    power: float


def quantise_rows(weights: Floats) -> Int8Rows:
    """Quantise rows of a weight; the scale of a group is the BF16 value of least squared error."""
    grouped = weights.reshape(weights.shape[0], -1, GROUP)
    largest = np.abs(grouped).max(axis=2)
    smallest_scale = np.float32(2.0**-126)
    first = bf16_bits(np.maximum(largest / np.float32(127), smallest_scale)).astype(np.int32)
    best_error = np.full(largest.shape, np.inf, np.float32)
    best = first.copy()
    by_maximum = None
    for step in _STEPS:
        candidate = np.maximum(first + step, 0x80)
        error = _group_errors(grouped, from_bf16_bits(candidate.astype(np.uint16)))
        if step == 0:
            by_maximum = error
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best = np.where(better, candidate, best)
    scales = np.where(largest > 0, best, 0x3F80).astype("<u2")
    codes = _codes(grouped, from_bf16_bits(scales)).astype(np.int16) + 128
    return Int8Rows(
        codes.astype(np.uint8).reshape(weights.shape),
        scales,
        float(best_error.sum(dtype=np.float64)),
        float(by_maximum.sum(dtype=np.float64)) if by_maximum is not None else 0.0,
        float(np.square(weights, dtype=np.float64).sum()),
    )


def pack_rows(codes: Codes) -> Any:
    """Return the columns of ``qweight`` that belong to these rows: uint32 ``[in / 4, rows]``."""
    return np.ascontiguousarray(codes.view("<u4").T)


def zero_points(outputs: int, inputs: int) -> bytes:
    """Return the bytes of ``qzeros``."""
    return bytes([ZERO_POINT_BYTE]) * (inputs // GROUP * outputs)


def _codes(grouped: Any, scales: Any) -> Any:
    return np.clip(np.rint(grouped / scales[:, :, None]), -128, 127)


def _group_errors(grouped: Any, scales: Any) -> Any:
    """Return squared errors per group, added in a fixed order so every platform agrees."""
    spread = scales[:, :, None]
    error = np.square(_codes(grouped, scales) * spread - grouped)
    width = error.shape[2]
    while width > 1:
        width //= 2
        error = error[:, :, :width] + error[:, :, width:]
    return error[:, :, 0]
