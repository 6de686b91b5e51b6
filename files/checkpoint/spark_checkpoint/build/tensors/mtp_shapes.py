"""Shapes of MTP tensors against the model's sizes: the base has none to compare them with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.index import SIXTEEN_BIT
from spark_checkpoint.format.tree import Tree
from spark_checkpoint.sources.donor import Donor
from spark_checkpoint.verify.gates import FP8, WEIGHT, fp8_fits, scale_of

_EMBEDDING = "model.language_model.embed_tokens.weight"
_FIX = "fetch the donor again, or use the FP8 repository of the same model"

# A dimension is a number of times a size of config.json; "" is any size.
_Shape = tuple[tuple[int, str], ...]
_ANY, _ONE = (1, ""), (1, "1")
_HIDDEN, _HEAD = (1, "hidden_size"), (1, "head_dim")
_EXPERT, _SHARED = (1, "moe_intermediate_size"), (1, "shared_expert_intermediate_size")
_SHAPES: tuple[tuple[str, _Shape], ...] = (
    (r"mtp\.fc\.weight", (_HIDDEN, (2, "hidden_size"))),
    (r"mtp\.(norm|pre_fc_norm_\w+)\.weight|.*layernorm\.weight", (_HIDDEN,)),
    (r".*\.self_attn\.[qk]_norm\.weight", (_HEAD,)),
    (r".*\.self_attn\.[qkv]_proj\.weight", (_ANY, _HIDDEN)),
    (r".*\.self_attn\.o_proj\.weight", (_HIDDEN, _ANY)),
    (r".*\.mlp\.gate\.weight", ((1, "num_experts"), _HIDDEN)),
    (r".*\.shared_expert_gate\.weight", (_ONE, _HIDDEN)),
    (r".*\.shared_expert\.(gate|up)_proj\.weight", (_SHARED, _HIDDEN)),
    (r".*\.shared_expert\.down_proj\.weight", (_HIDDEN, _SHARED)),
    (r".*\.experts\.\d+\.(gate|up)_proj\.weight", (_EXPERT, _HIDDEN)),
    (r".*\.experts\.\d+\.down_proj\.weight", (_HIDDEN, _EXPERT)),
)


def model_sizes(base: Tree, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes config.json gives; the hidden size also from the base's embedding."""
    sizes = {"1": 1}
    if _EMBEDDING in base.owner:
        sizes["hidden_size"] = base.tensor(_EMBEDDING).shape[-1]
    text = config.get("text_config")
    for level in (config, text if isinstance(text, Mapping) else {}):
        sizes |= {key: size for key, size in level.items() if type(size) is int and size > 0}
    return sizes


def graftable(
    names: Sequence[str], donor: Donor, sizes: Mapping[str, int], block: tuple[int, int]
) -> None:
    """Refuse MTP tensors whose dtypes or shapes cannot be this model's, from headers alone."""
    scales = {name: scale_of(name) for name in names if scale_of(name) in donor.names}
    entries = donor.tensors([*names, *scales.values()])
    for name in names:
        entry = entries[name]
        if entry.dtype == FP8:
            if name not in scales:
                raise GateRefused(f"donor {name}", "is FP8 without block scales", _FIX)
            module = f"donor {name.removesuffix(WEIGHT)}"
            fp8_fits(module, entry.shape, entry, entries[scales[name]], block)
        elif entry.dtype not in SIXTEEN_BIT:
            raise GateRefused(
                f"donor {name}", f"is {entry.dtype}, expected {FP8} or a 16-bit float", _FIX
            )
        _check_shape(name, entry.shape, sizes)


def _check_shape(name: str, found: tuple[int, ...], sizes: Mapping[str, int]) -> None:
    shape = next((shape for pattern, shape in _SHAPES if re.fullmatch(pattern, name)), None)
    if shape is None:
        return
    expected = [times * sizes[key] if key in sizes else "any" for times, key in shape]
    fits = len(found) == len(expected) and all(
        want in ("any", have) for have, want in zip(found, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, expected))
        raise GateRefused(f"donor {name}", f"is {list(found)}, expected [{wanted}]", _FIX)
