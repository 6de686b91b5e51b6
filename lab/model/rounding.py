"""The number formats of the two repositories.

BF16, packed INT4 and block FP8, in numpy. Only encoders: plugin, checkpoint builder and tests have
separate decoders, so that an error here does not cancel out.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lab.model.original import Floats
from lab.model.shape import BLOCK, GROUP

INT4_ZERO = 8  # the code of 0.0; the format stores it minus one
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def bf16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def bf16_values(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_round(values: Floats) -> Floats:
    return bf16_values(bf16_bits(values))


def bf16(values: Floats) -> Tensor:
    return Tensor("BF16", values.shape, bf16_bits(values).astype("<u2").tobytes())


def float32(values: Floats) -> Tensor:
    return Tensor("F32", values.shape, values.astype("<f4").tobytes())


def int4_scales(weight: Floats) -> npt.NDArray[np.float16]:
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scales: npt.NDArray[np.float16] = np.maximum(np.abs(groups).max(axis=2) / 7.0, 1e-4).astype(
        np.float16
    )
    return scales


def int4_codes(weight: Floats, scales: npt.NDArray[np.float16]) -> npt.NDArray[np.int8]:
    groups = weight.reshape(*scales.shape, GROUP)
    codes = np.rint(groups / scales.astype(np.float32)[..., None]).clip(-8, 7).astype(np.int8)
    shaped: npt.NDArray[np.int8] = codes.reshape(weight.shape)
    return shaped


def int4_values(codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float16]) -> Floats:
    groups = codes.reshape(*scales.shape, GROUP).astype(np.float32)
    values: Floats = (groups * scales.astype(np.float32)[..., None]).reshape(codes.shape)
    return values


def int4(weight: Floats) -> dict[str, Tensor]:
    """Symmetric INT4 in groups of 128 inputs.

    `qweight`, `qzeros`, `scales`. Eight codes share an int32, the first in the lowest bits: codes
    of adjacent *inputs* in `qweight`, zero points of adjacent *outputs* in `qzeros`.
    """
    outputs, inputs = weight.shape
    scales = int4_scales(weight)
    columns = (int4_codes(weight, scales) + INT4_ZERO).T.astype(np.uint32)
    zeros = np.full((inputs // GROUP, outputs), INT4_ZERO - 1, dtype=np.uint32)
    return {
        "qweight": _int32(_pack(columns.reshape(inputs // 8, 8, outputs).swapaxes(1, 2))),
        "qzeros": _int32(_pack(zeros.reshape(inputs // GROUP, outputs // 8, 8))),
        "scales": Tensor("F16", scales.T.shape, scales.T.astype("<f2").tobytes()),
    }


def _pack(codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    packed: npt.NDArray[np.uint32] = (codes << shifts).sum(axis=-1, dtype=np.uint32)
    return packed


def _int32(values: npt.NDArray[np.uint32]) -> Tensor:
    return Tensor("I32", values.shape, values.astype("<u4").tobytes())


def fp8(weight: Floats) -> dict[str, Tensor]:
    rows, columns = weight.shape
    padded = np.zeros((-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK), np.float32)
    padded[:rows, :columns] = weight
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = np.maximum(np.abs(blocks).max(axis=(1, 3)), 1e-12) / E4M3_MAX
    scales = bf16_round(scales.astype(np.float32))
    scaled = (
        (blocks / scales[:, None, :, None])
        .reshape(padded.shape)[:rows, :columns]
        .astype(np.float32)
    )
    return {
        "weight": Tensor("F8_E4M3", weight.shape, e4m3_codes(scaled).tobytes()),
        "weight_scale_inv": bf16(scales),
    }


def e4m3_codes(values: Floats) -> npt.NDArray[np.uint8]:
    table = _e4m3_positive()
    magnitude = np.minimum(np.abs(values), E4M3_MAX)
    above = np.searchsorted(table, magnitude).clip(1, len(table) - 1)
    below = above - 1
    to_above, to_below = table[above] - magnitude, magnitude - table[below]
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = np.where(take_above, above, below).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def _e4m3_positive() -> Floats:
    codes = np.arange(127)  # 127 would be NaN
    exponent, mantissa = codes >> 3, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal).astype(np.float32)
