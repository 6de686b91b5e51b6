"""The exact sets a build demands of its sources, and what a different set means.

The engine boots without a warning when MTP tensors or one scale are missing; these sets are
the guard.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence, Set
from pathlib import Path

from spark_contract.orders import DonorShape
from spark_contract.patterns import expand

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.groups import groups, listed
from spark_checkpoint.format.index import SIXTEEN_BIT, Tensor

MTP_PREFIX = "mtp."
WEIGHT = ".weight"
SCALE = ".weight_scale_inv"
FP8 = "F8_E4M3"

# What a whole group of missing or surplus names usually means, by a part of the names.
_CAUSES = {
    ".linear_attn.": "the linear-attention projections are quantised differently: "
    "another base generation",
    ".self_attn.": "the attention projections are quantised differently: another base generation",
    ".shared_expert.": "the shared experts are quantised differently: "
    "a hybrid already, or another base",
    ".mlp.experts.": "another number of experts or layers: another model",
    "lm_head": "the head is quantised differently",
    ".visual.": "the vision tower differs: a text-only or other tree",
}
_NAMES_FIX = (
    "deploy the commits in the lock; `spark-deploy inspect` lists the models a repository fits, "
    "`spark-deploy add` serves it as published; if these are the commits of a shipped model, "
    "report this line to the project"
)
_FP8_FIX = "use the FP8 repositories of the same model"
_MTP_CAUSE = "the MTP tensors differ: lost by an earlier build, or quantised differently"


def same_names(where: str, what: str, found: Iterable[str], expected: Iterable[str]) -> None:
    """Refuse unless both are the same set; the message has the groups and the first names."""
    # What is a set already is not copied: a large model has 280,000 names.
    have = found if isinstance(found, Set) else set(found)
    want = expected if isinstance(expected, Set) else set(expected)
    if have == want:
        return
    parts = [f"{what}: {len(have)} names, expected {len(want)}"]
    missing, surplus = want - have, have - want
    if missing:
        parts.append(f"missing {len(missing)} ({groups(missing)}): {listed(missing)}")
    if surplus:
        parts.append(f"surplus {len(surplus)} ({groups(surplus)}): {listed(surplus)}")
    odd = missing | surplus
    mtp = {name for name in odd if name.startswith(MTP_PREFIX)}
    rest = odd - mtp
    causes = [cause for part, cause in _CAUSES.items() if any(part in name for name in rest)]
    causes += [_MTP_CAUSE] if mtp else []
    if causes:
        parts.append(f"likely {'; '.join(causes)}")
    raise GateRefused(where, ", ".join(parts), _NAMES_FIX)


def scale_of(weight_name: str) -> str:
    """Return the name of the block scales of an FP8 weight."""
    return weight_name.removesuffix(WEIGHT) + SCALE


def donor_unmatched(donor: Iterable[str], base: Container[str], swap: Iterable[str]) -> set[str]:
    """Return donor names outside routed experts without a partner in the base or the swap."""
    swapped = {module + suffix for module in swap for suffix in (WEIGHT, SCALE)}
    outside = (name for name in donor if ".mlp.experts." not in name and name not in swapped)
    # The drafter's file does not count as the base's own.
    return {name for name in outside if name not in base or name.startswith(MTP_PREFIX)}


def swappable(where: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse unless every base weight to swap is a 16-bit matrix."""
    for name, tensor in tensors.items():
        if tensor.dtype not in SIXTEEN_BIT or len(tensor.shape) != 2:
            raise GateRefused(
                str(where),
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected a 16-bit matrix",
                "use a base whose shared experts are 16-bit",
            )


def planned_shapes(
    shapes: Iterable[DonorShape], swap: Sequence[str], base: Mapping[str, Tensor]
) -> dict[str, DonorShape]:
    """Return the plan's shapes by module; refuse other modules, or a base of other shapes."""
    planned = {module: part for part in shapes for module in expand(part.modules)}
    if planned:
        same_names("donor_shapes", "modules of the plan", planned, swap)
    for module, part in planned.items():
        _as_planned(f"base {module}{WEIGHT}", base[module].shape, part.weight)
    return planned


def donor_as_planned(module: str, part: DonorShape, weight: Tensor, scale: Tensor) -> None:
    """Refuse a donor whose headers say other shapes than the plan."""
    _as_planned(f"donor {module}{WEIGHT}", weight.shape, part.weight)
    _as_planned(f"donor {module}{SCALE}", scale.shape, part.scale)


def _as_planned(where: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise GateRefused(
            where,
            f"is {list(found)}, the plan's donor_shapes say {list(expected)}",
            "use the repositories this model's catalog file was written for, or correct it",
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
        (WEIGHT, weight, frozenset({FP8}), shape),
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
