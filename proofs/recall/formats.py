"""What a TurboQuant preset makes of keys and values, in plain torch and without an engine.

The arithmetic of vLLM 0.33.0's store kernels and of what reads their slots
(``triton_turboquant_store.py`` and the engine's ``quantization/turboquant``): a key is FP8, or a
Hadamard rotation of its direction with every coordinate at the nearest of ``2**bits`` Lloyd-Max
centroids, its length beside it in 16 bits; a value lies on ``2**bits`` even steps between its
smallest and largest coordinate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

HALF, FP8 = torch.float16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Preset:
    """Bits of a key's and a value's coordinate; ``corrected``: centroids get the right length."""

    key_bits: int
    value_bits: int
    corrected: bool = True

    def bytes_per_head(self, size: int) -> int:
        """Return the bytes of one token's key and value of one head."""
        key = size if self.key_bits == 8 else math.ceil(size * self.key_bits / 8) + 2
        found = key + math.ceil(size * self.value_bits / 8) + 4
        return found + found % 2


PRESETS = {
    "turboquant_k8v4": Preset(8, 4, corrected=False),
    "turboquant_4bit_nc": Preset(4, 4),
    "turboquant_k3v4_nc": Preset(3, 4),
    "turboquant_3bit_nc": Preset(3, 3),
}


def keys(x: Tensor, preset: Preset) -> Tensor:
    """Return keys ``[..., size]`` as they are read back."""
    x = x.float()
    if preset.key_bits == 8:
        return x.to(FP8).float()
    size = x.shape[-1]
    turn = hadamard(size)
    length = x.norm(dim=-1, keepdim=True)
    turned = x / (length + 1e-8) @ turn
    levels = centroids(size, preset.key_bits)
    found = levels[torch.bucketize(turned, (levels[1:] + levels[:-1]) / 2, right=True)]
    if preset.corrected:
        found = found / found.norm(dim=-1, keepdim=True)
    return found * length.to(HALF).float() @ turn


def values(x: Tensor, preset: Preset) -> Tensor:
    """Return values ``[..., size]`` as they are read back."""
    x = x.float()
    steps = 2**preset.value_bits - 1
    least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((most - least) / steps).clamp_min(1e-8)
    number = ((x - least) / step + 0.5).floor().clamp(0, steps)
    return number * step.to(HALF).float() + least.to(HALF).float()


@lru_cache(maxsize=4)
def hadamard(size: int) -> Tensor:
    """Return the rotation, its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


@lru_cache(maxsize=4)
def centroids(size: int, bits: int) -> Tensor:
    """Return the Lloyd-Max levels of one coordinate of a random direction, about N(0, 1/size)."""
    deviation = size**-0.5
    reach = 3.5 * deviation
    grid = torch.linspace(-3 * reach, 3 * reach, 60_001, dtype=torch.float64)
    density = torch.exp(-(grid**2) * size / 2)
    count = 2**bits
    levels = -reach + 2 * reach * (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for _ in range(300):
        owner = torch.bucketize(grid, (levels[1:] + levels[:-1]) / 2)
        mass = torch.zeros(count, dtype=torch.float64).index_add_(0, owner, density)
        levels = torch.zeros_like(mass).index_add_(0, owner, density * grid) / mass
    return levels.float()
