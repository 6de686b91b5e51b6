"""TurboQuant cache slots read back in plain torch: what the attention kernels really see."""

from __future__ import annotations

from typing import Any

import torch


def dequantise(slots: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in float32.

    A slot holds the key (FP8, or centroid numbers and a 16-bit norm) and then the value (numbers,
    a 16-bit scale and a 16-bit smallest value); numbers lie one after the other, low bits first.

    Args:
        slots: bytes ``[tokens, heads, slot]``.
        config: the engine's ``TurboQuantConfig``: bit widths and sizes of the format.
    """
    size, key_bytes = config.head_dim, config.key_packed_size
    if config.key_fp8:
        key = slots[..., :size].contiguous().view(torch.float8_e4m3fn).float()
    else:
        key = _rotated_key(slots[..., :key_bytes], config) @ _hadamard(size, slots.device)
    bits = config.effective_value_quant_bits
    data_bytes = size * bits // 8
    value = _numbers(slots[..., key_bytes : key_bytes + data_bytes], bits, size).float()
    scale = _half(slots, key_bytes + data_bytes)
    smallest = _half(slots, key_bytes + data_bytes + 2)
    return key, value * scale + smallest


def _rotated_key(part: torch.Tensor, config: Any) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids

    size, bits = config.head_dim, config.key_mse_bits
    centroids = get_centroids(size, config.centroid_bits).to(part.device)
    found = centroids[_numbers(part[..., : size * bits // 8], bits, size).long()]
    if config.norm_correction:
        found = found / found.norm(dim=-1, keepdim=True)
    return found * _half(part, size * bits // 8)


def _numbers(data: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    places = torch.arange(8, device=data.device, dtype=torch.uint8)
    stream = (data.unsqueeze(-1) >> places) & 1
    groups = stream.flatten(-2)[..., : count * bits].unflatten(-1, (count, bits)).int()
    return (groups << torch.arange(bits, device=data.device)).sum(-1)


def _half(slots: torch.Tensor, place: int) -> torch.Tensor:
    return slots[..., place : place + 2].contiguous().view(torch.float16).float()


def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5
