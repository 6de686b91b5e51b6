"""The exact sets a build demands of its sources, and what a different set means.

The engine boots without a warning when MTP tensors or one scale are missing; these sets are
the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.header import Tensor
from spark_checkpoint.numbers import SIXTEEN_BIT
from spark_checkpoint.patterns import groups

MTP_PREFIX = "mtp."
WEIGHT = ".weight"
SCALE = ".weight_scale_inv"

_Rule = tuple[Callable[[str], bool], str]
# What a whole group of missing or surplus names usually means.
_CAUSES: tuple[_Rule, ...] = (
    (
        lambda name: ".linear_attn." in name,
        "the linear-attention projections are quantised differently: another base generation",
    ),
    (
        lambda name: ".self_attn." in name,
        "the attention projections are quantised differently: another base generation",
    ),
    (
        lambda name: ".shared_expert." in name,
        "the shared experts are quantised differently: a hybrid already, or another base",
    ),
    (lambda name: ".mlp.experts." in name, "another number of experts or layers: another model"),
    (lambda name: name.startswith("lm_head"), "the head is quantised differently"),
    (lambda name: ".visual." in name, "the vision tower differs: a text-only or other tree"),
)
_FP8_FIX = "use the FP8 repositories of the same model"
_MTP_CAUSE = "the MTP tensors differ: lost by an earlier build, or quantised differently"


def same_names(where: str, what: str, found: Iterable[str], expected: Iterable[str]) -> None:
    """Refuse unless both are the same set; the message counts groups, not names."""
    # What is a set already is not copied: a large model has 280,000 names.
    have = found if isinstance(found, Set) else set(found)
    want = expected if isinstance(expected, Set) else set(expected)
    if have == want:
        return
    parts = [f"{what}: {len(have)} names, expected {len(want)}"]
    missing, surplus = want - have, have - want
    if missing:
        parts.append(f"missing {len(missing)} ({groups(missing)})")
    if surplus:
        parts.append(f"surplus {len(surplus)} ({groups(surplus)})")
    odd = missing | surplus
    mtp = {name for name in odd if name.startswith(MTP_PREFIX)}
    causes = [cause for rule, cause in _CAUSES if any(map(rule, odd - mtp))]
    causes += [_MTP_CAUSE] if mtp else []
    if causes:
        parts.append(f"likely {'; '.join(causes)}")
    raise GateRefused(
        where,
        ", ".join(parts),
        "use the locked commits, or correct the model's tensor patterns after `inspect`",
    )


def donor_unmatched(donor: Iterable[str], base: Iterable[str], swap: Iterable[str]) -> set[str]:
    """Return donor names outside routed experts without a partner in the base or the swap."""
    partners = {name for name in base if not name.startswith(MTP_PREFIX)}
    for module in swap:
        partners |= {module + WEIGHT, module + SCALE}
    return {name for name in donor if ".mlp.experts." not in name and name not in partners}


def swappable(where: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse unless every base weight to swap is a 16-bit matrix."""
    for name, tensor in tensors.items():
        if tensor.dtype not in SIXTEEN_BIT or len(tensor.shape) != 2:
            raise GateRefused(
                str(where),
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected a 16-bit matrix",
                "use a base whose shared experts are 16-bit",
            )


def fp8_fits(
    where: str, shape: tuple[int, ...], weight: Tensor, scale: Tensor, block: tuple[int, int]
) -> None:
    """Refuse a pair whose dtypes or shapes cannot be a matrix in FP8 with block scales."""
    if len(shape) != 2:
        raise GateRefused(where + WEIGHT, f"is {list(shape)}, expected a matrix", _FP8_FIX)
    rows, columns = shape
    scale_shape = (-(-rows // block[0]), -(-columns // block[1]))
    expected: list[tuple[str, Tensor, frozenset[str], tuple[int, ...]]] = [
        (WEIGHT, weight, frozenset({"F8_E4M3"}), shape),
        (SCALE, scale, frozenset({"BF16", "F32"}), scale_shape),
    ]
    for suffix, tensor, dtypes, shape in expected:
        if tensor.dtype not in dtypes or tensor.shape != shape:
            raise GateRefused(
                f"{where}{suffix}",
                f"is {tensor.dtype} {list(tensor.shape)}, expected "
                f"{' or '.join(sorted(dtypes))} {list(shape)}",
                _FP8_FIX,
            )


def packable(name: str, tensor: Tensor, *, head: bool) -> None:
    """Refuse a weight INT8 packing (or the engine's loader for it) cannot take."""
    reason = ""
    if tensor.dtype not in SIXTEEN_BIT or len(tensor.shape) != 2:
        reason = f"is {tensor.dtype} {list(tensor.shape)}, expected a 16-bit matrix"
    elif tensor.shape[1] % 128:
        reason = f"has {tensor.shape[1]} inputs, no multiple of the group of 128"
    elif head and tensor.shape[0] % 64:
        reason = (
            f"has a vocabulary of {tensor.shape[0]}, no multiple of 64: "
            "the engine pads it and its loader then fails on packed tensors"
        )
    elif tensor.shape[0] % 4:
        reason = f"has {tensor.shape[0]} outputs, no multiple of 4"
    if reason:
        raise GateRefused(name, reason, "plan it with `keep`")
