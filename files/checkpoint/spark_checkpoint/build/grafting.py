"""Takes MTP tensors the base lacks from the donor, once they can be what their names say.

The base has nothing to compare them with, and the engine drafts with whatever it is given: a
damaged head serves right answers slowly. So shapes are held against the model's sizes, and
values must at least be numbers. Everything is read in pieces of a few megabytes at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spark_checkpoint.build.replacements import Surgery, fp8_rows, scale_of
from spark_checkpoint.build.staging import NewTensor, pieces_of_span
from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.header import SIXTEEN_BIT, Tensor
from spark_checkpoint.format.numbers import bf16_bits
from spark_checkpoint.format.tree import Span, Tree
from spark_checkpoint.sources.donor import Donor
from spark_checkpoint.verify.gates import WEIGHT, fp8_fits

_EMBEDDING = "model.language_model.embed_tokens.weight"
_FP8 = "F8_E4M3"
_PIECE_BYTES = 1 << 20
_EXPONENT_BITS = {"BF16": 0x7F80, "F16": 0x7C00}
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
        if entry.dtype == _FP8:
            if name not in scales:
                raise GateRefused(f"donor {name}", "is FP8 without block scales", _FIX)
            module = f"donor {name.removesuffix(WEIGHT)}"
            fp8_fits(module, entry.shape, entry, entries[scales[name]], block)
        elif entry.dtype not in SIXTEEN_BIT:
            raise GateRefused(
                f"donor {name}", f"is {entry.dtype}, expected {_FP8} or a 16-bit float", _FIX
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


def graft_mtp(names: Sequence[str], surgery: Surgery) -> None:
    """Take MTP tensors the base lacks from the donor, its FP8 ones dequantised to BF16."""
    grafted = []
    for name in names:
        entry, span = surgery.taken[name], surgery.spans[name]
        if entry.dtype == _FP8:
            span = _dequantised(name, surgery)
            entry = Tensor("BF16", entry.shape, 0, span.size_bytes)
        else:
            _check_values(name, entry, pieces_of_span(span, _PIECE_BYTES))
        grafted.append(NewTensor(name, entry.dtype, entry.shape, span))
    surgery.changes.added.setdefault("", []).extend(grafted)
    surgery.changes.report["mtp_grafted"] = len(grafted)


def _dequantised(name: str, surgery: Surgery) -> Span:
    """Stage the BF16 form of an FP8 matrix, one row of blocks at a time, and check its values."""
    entry, span, scales = surgery.taken[name], surgery.spans[name], surgery.donor_scales(name)
    plain = surgery.stage.reserve(span.size_bytes * 2)

    def pieces() -> Iterator[bytes]:
        position = 0
        for rows in fp8_rows(span, scales, entry.shape[1], surgery.block):
            values = bf16_bits(rows).tobytes()
            surgery.stage.write(plain, position, values)
            position += len(values)
            yield values

    _check_values(name, entry._replace(dtype="BF16"), pieces())
    return plain


def _check_values(name: str, entry: Tensor, pieces: Iterator[bytes]) -> None:
    """Refuse NaN, infinity, and a matrix of zeros; a norm around zero may be all zero."""
    exponent = _EXPONENT_BITS[entry.dtype]
    any_nonzero = len(entry.shape) < 2
    for piece in pieces:
        words = np.frombuffer(piece, "<u2")
        if bool(((words & exponent) == exponent).any()):
            raise GateRefused(f"donor {name}", "holds NaN or infinite values", _FIX)
        any_nonzero = any_nonzero or bool((words & 0x7FFF).any())
    if not any_nonzero:
        raise GateRefused(f"donor {name}", "is all zero", _FIX)
