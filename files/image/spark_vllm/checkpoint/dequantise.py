"""Checkpoint formats back to BF16, one module at a time.

All values are computed in float32 and rounded once. Scales are rounded to BF16 first, because
the engine's native kernels hold them so; the portable mode then answers what the kernels would.
"""

from __future__ import annotations

import torch

INT32_BITS = 32


def packed_bits(qweight: torch.Tensor, scales: torch.Tensor, group_size: int) -> int:
    """Return the bit width of a GPTQ-packed weight, from its shapes.

    Args:
        qweight: int32 ``[in * bits / 32, out]``.
        scales: ``[in / group_size, out]``.
        group_size: input features that share one scale.

    Raises:
        ValueError: when the shapes fit no width of 4 or 8 bits.
    """
    in_features = scales.shape[0] * group_size
    bits, rest = divmod(INT32_BITS * int(qweight.shape[0]), int(in_features))
    if rest or bits not in (4, 8) or qweight.shape[1] != scales.shape[1]:
        raise ValueError(
            f"qweight {list(qweight.shape)} and scales {list(scales.shape)} are no 4-bit or 8-bit "
            f"weight of group size {group_size}"
        )
    return bits


def unpack_gptq(qweight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the signed integers of a symmetric GPTQ-packed weight.

    Args:
        qweight: int32 ``[in * bits / 32, out]``; the lowest bits hold the first input feature.
        bits: width of one value; stored values carry the bias ``2 ** (bits - 1)``.

    Returns:
        int16 ``[in, out]``, from ``-2 ** (bits - 1)`` upwards.
    """
    shifts = torch.arange(0, INT32_BITS, bits, dtype=torch.int32)
    values = (qweight.unsqueeze(1) >> shifts.view(1, -1, 1)) & (2**bits - 1)
    return (values - 2 ** (bits - 1)).to(torch.int16).flatten(0, 1)


def gptq_weight(qweight: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return the BF16 weight ``[out, in]`` of a symmetric GPTQ-packed module.

    Args:
        qweight: int32 ``[in * bits / 32, out]``.
        scales: FP16 or BF16 ``[in / group_size, out]``.
        group_size: input features that share one scale.
    """
    values = unpack_gptq(qweight, packed_bits(qweight, scales, group_size))
    grouped = values.view(scales.shape[0], group_size, -1).float()
    grouped *= scales.to(torch.bfloat16).float().unsqueeze(1)
    return grouped.flatten(0, 1).t().to(torch.bfloat16).contiguous()


def fp8_block_weight(
    weight: torch.Tensor, scale: torch.Tensor, block_shape: tuple[int, int]
) -> torch.Tensor:
    """Return the BF16 weight ``[out, in]`` of a block-scaled FP8 module.

    Args:
        weight: float8_e4m3fn ``[out, in]``.
        scale: BF16 or FP32 ``[ceil(out / rows), ceil(in / columns)]``.
        block_shape: (rows, columns) of one block.

    Raises:
        ValueError: when the scales do not cover the weight.
    """
    rows, columns = block_shape
    out_features, in_features = weight.shape
    expected = (-(-out_features // rows), -(-in_features // columns))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"block scales have shape {list(scale.shape)}, the weight needs {list(expected)}"
        )
    spread = scale.float().repeat_interleave(rows, 0)[:out_features]
    spread = spread.repeat_interleave(columns, 1)[:, :in_features]
    return (weight.float() * spread).to(torch.bfloat16)
