"""Quantize LM head rows from BF16 to INT8 with a scale per 128 inputs."""

from __future__ import annotations

import torch

GROUP_SIZE = 128
ROWS_PER_BLOCK = 8192

LARGEST = 127


def quantize_rows(
    weight: torch.Tensor, rows_per_block: int = ROWS_PER_BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``weight`` as INT8 values and scales.

    Values use the scale *as stored* in BF16, so rounding the scale adds no error.

    Args:
        weight: ``[rows, in]``, any float dtype.
        rows_per_block: rows converted at once.

    Returns:
        int8 ``[rows, in rounded up to 128]``, padded with zeros, and BF16 scales
        ``[groups, rows]``.
    """
    rows, in_features = weight.shape
    groups = -(-in_features // GROUP_SIZE)
    device = weight.device
    values = torch.zeros((rows, groups * GROUP_SIZE), dtype=torch.int8, device=device)
    scales = torch.empty((groups, rows), dtype=torch.bfloat16, device=device)
    for start in range(0, rows, rows_per_block):
        block = slice(start, min(start + rows_per_block, rows))
        source = torch.nn.functional.pad(
            weight[block].float(), (0, groups * GROUP_SIZE - in_features)
        ).view(-1, groups, GROUP_SIZE)
        scale = (source.abs().amax(-1) / LARGEST).to(torch.bfloat16)
        scales[:, block] = scale.t()
        divisor = torch.where(scale == 0, 1, scale).float().unsqueeze(-1)
        rounded = (source / divisor).round_().clamp_(-LARGEST, LARGEST)
        values[block] = rounded.to(torch.int8).view(-1, groups * GROUP_SIZE)
    return values, scales


def dequantize_rows(values: torch.Tensor, scales: torch.Tensor, in_features: int) -> torch.Tensor:
    """Return the float32 weight ``[rows, in_features]`` that the kernel uses."""
    groups, rows = scales.shape
    wide = values.float().view(rows, groups, GROUP_SIZE) * scales.t().float().unsqueeze(-1)
    return wide.view(rows, -1)[:, :in_features]
