"""Compare tensor names, dtypes and shapes with the exact sets of a plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from heapq import nsmallest
from pathlib import Path

from spark_contract.orders import BuildPlan, DonorShape, RequantizePlan, expand, expand_all, uses_up

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.headers import SIXTEEN_BIT, Tensor

_NUMBER = re.compile(r"\d+")
_LISTED_NAMES = 10
_LONGEST_NAME = 120


def groups(names: Iterable[str], limit: int = 4) -> str:
    """Name the groups a set of names falls into, largest first: ``288 x a.{N}.b``.

    Numbers count as one group, so 10,000 names make a readable line.
    """
    counted = Counter(_NUMBER.sub("{N}", name) for name in names)
    largest = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{count} x {name}" for name, count in largest[:limit]]
    if len(counted) > limit:
        shown.append(f"{len(counted) - limit} more groups")
    return ", ".join(shown)


def listed(names: Collection[str]) -> str:
    """List the first names of a set exactly, and how many more there are."""
    shown = [
        name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        for name in nsmallest(_LISTED_NAMES, names)
    ]
    if len(names) > _LISTED_NAMES:
        shown.append(f"{len(names) - _LISTED_NAMES} more")
    return ", ".join(shown)


MTP_PREFIX = "mtp."
WEIGHT = ".weight"
SCALE = ".weight_scale_inv"
FP8 = "F8_E4M3"

# Likely causes of missing or surplus names, by a part of the name.
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
    "deploy the commits in the lock; `spark-deploy add --dry` lists the models a repository fits, "
    "`spark-deploy add` serves it as published; if these are the commits of a shipped model, "
    "report this line to the project"
)
_FP8_FIX = "use the FP8 repositories of the same model"
_MTP_CAUSE = "the MTP tensors differ: lost by an earlier build, or quantised differently"


def check_same_names(where: str, what: str, found: Iterable[str], expected: Iterable[str]) -> None:
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


def unmatched_donor_names(
    donor: Iterable[str], base: Container[str], swap: Iterable[str]
) -> set[str]:
    """Return donor names outside routed experts without a partner in the base or the swap."""
    swapped = {module + suffix for module in swap for suffix in (WEIGHT, SCALE)}
    outside = (name for name in donor if ".mlp.experts." not in name and name not in swapped)
    # The drafter's file does not count as the base's own.
    return {name for name in outside if name not in base or name.startswith(MTP_PREFIX)}


def check_swappable(where: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse unless every base weight to swap is a 16-bit matrix."""
    for name, tensor in tensors.items():
        if tensor.dtype not in SIXTEEN_BIT or len(tensor.shape) != 2:
            raise GateRefused(
                str(where),
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected a 16-bit matrix",
                "use a base whose shared experts are 16-bit",
            )


def check_planned_shapes(
    shapes: Iterable[DonorShape], swap: Sequence[str], base: Mapping[str, Tensor]
) -> dict[str, DonorShape]:
    """Return the plan's shapes by module; refuse other modules, or a base of other shapes."""
    planned = {module: part for part in shapes for module in expand(part.modules)}
    if planned:
        check_same_names("donor_shapes", "modules of the plan", planned, swap)
    for module, part in planned.items():
        _as_planned(f"base {module}{WEIGHT}", base[module].shape, part.weight)
    return planned


def check_donor_shapes(module: str, part: DonorShape, weight: Tensor, scale: Tensor) -> None:
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


def check_fp8_pair(
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


def check_int8_packable(name: str, tensor: Tensor, *, head: bool) -> None:
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


HEAD = "lm_head.weight"
_PACKED = (".qweight", ".scales", ".qzeros")


def overlay_name(name: str) -> str:
    """Return the name a replacement has in an overlay, where the base's own name still exists."""
    suffix = "_int8" if name.endswith(_PACKED) else "_fp8"
    return name + suffix


def replacements(plan: BuildPlan) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    suffixes = {"int8-g128": _PACKED, "fp8-donor": (WEIGHT, SCALE), "fp8-self": (WEIGHT, SCALE)}
    for module in swapped_modules(plan) if plan.shared_experts in suffixes else ():
        new = suffixes[plan.shared_experts]
        found[module + WEIGHT] = tuple(module + suffix for suffix in new)
    if plan.head == "int8-g128":
        found[HEAD] = tuple(HEAD.removesuffix(WEIGHT) + suffix for suffix in _PACKED)
    return found


def base_patterns(plan: BuildPlan) -> list[str]:
    """Return patterns of the base's names outside mtp.*; a ready hybrid has scales as well."""
    patterns = list(plan.base_tensors)
    if plan.shared_experts == "fp8-base":
        patterns += [module + SCALE for module in swapped_modules(plan)]
    return patterns


def check_result_names(where: str, found: Collection[str], plan: BuildPlan, layout: str) -> None:
    """Refuse unless ``found`` are exactly the names of the plan's result in ``layout``.

    All names of a large model fill memory, so they are expanded only for the error.
    """
    replaced = replacements(plan)
    new = {
        overlay_name(name) if layout == "overlay" else name
        for names in replaced.values()
        for name in names
    }
    patterns = [*base_patterns(plan), *plan.mtp_tensors]
    # With what was replaced put back, the base's own patterns must give the rest.
    names = set(found)
    has_all_new = new <= names
    names -= new
    if has_all_new and names.isdisjoint(replaced):
        names.update(replaced)
        if uses_up(names, patterns):
            return
    expected = (expand_all(patterns) - replaced.keys()) | new
    check_same_names(where, "tensors of the plan's result", found, expected)


def check_quantised_names(where: str, found: Collection[str], plan: RequantizePlan) -> None:
    """Refuse unless ``found`` are exactly the names of a quantised tree."""
    patterns = [*plan.base_tensors, *plan.mtp_tensors]
    if not uses_up(set(found), patterns):
        check_same_names(where, "tensors of the quantised tree", found, expand_all(patterns))


def swapped_modules(plan: BuildPlan) -> list[str]:
    """Return the modules whose weights are replaced."""
    return [module for pattern in plan.swap for module in expand(pattern)]
