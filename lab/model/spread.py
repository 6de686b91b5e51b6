"""Rescales weights so that the model stays the same but the stored scales differ widely.

After training all scales are similar, so exchanged groups or layers would not show. INT4 and E4M3
codes stay the same, but a wrong scale is off by a large factor.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from lab.model.original import LAYERS, Floats
from lab.model.shape import GROUP, Shape

FED_BY = {  # modules that read the output of each norm
    "input_layernorm": (
        "linear_attn.in_proj_",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
    ),
    "post_attention_layernorm": ("mlp.",),
}

Factors = Callable[[int], Floats]  # by width


def spread(shape: Shape, weights: dict[str, Floats]) -> dict[str, Floats]:
    changed = dict(weights)
    for layer in range(shape.layers):
        exponent = shape.layers - 1 - 2 * layer  # 3, 1, -1, -3: any two differ by a factor of 4
        factors = partial(_factors, exponent)
        rescale_layer(changed, layer, factors)
        if shape.is_attention(layer):
            _behind_values(changed, f"{LAYERS}.{layer}.", factors)
    return changed


def rescale_layer(weights: dict[str, Floats], layer: int, factors: Factors) -> None:
    prefix = f"{LAYERS}.{layer}."
    for norm, readers in FED_BY.items():
        _behind_norm(weights, prefix, norm, readers, factors)
    _inside_experts(weights, prefix, factors)


def _factors(exponent: int, size: int) -> Floats:
    signs = np.where(np.arange(size) // GROUP % 2 == 0, 1, -1)
    made: Floats = np.exp2(exponent * signs).astype(np.float32)
    return made


def _behind_norm(
    weights: dict[str, Floats], prefix: str, norm: str, readers: tuple[str, ...], factors: Factors
) -> None:
    name = f"{prefix}{norm}.weight"
    scale = factors(weights[name].size)
    weights[name] = (1 + weights[name]) / scale - 1  # these norms are stored minus one
    for reader in weights:
        if reader.startswith(tuple(prefix + part for part in readers)) and not reader.endswith(
            "down_proj.weight"
        ):
            weights[reader] = weights[reader] * scale


def _inside_experts(weights: dict[str, Floats], prefix: str, factors: Factors) -> None:
    for name in [name for name in weights if name.startswith(f"{prefix}mlp.")]:
        if name.endswith("up_proj.weight"):
            scale = factors(weights[name].shape[0])
            down = name.replace("up_proj", "down_proj")
            weights[name] = weights[name] * scale[:, None]
            weights[down] = weights[down] / scale


def _behind_values(weights: dict[str, Floats], prefix: str, factors: Factors) -> None:
    """Each half of the output projection reads the values of a key-value head."""
    values, output = f"{prefix}self_attn.v_proj.weight", f"{prefix}self_attn.o_proj.weight"
    scale = factors(weights[output].shape[1])
    share = weights[output].shape[1] // weights[values].shape[0]
    weights[values] = weights[values] * scale[::share, None]
    weights[output] = weights[output] / scale
