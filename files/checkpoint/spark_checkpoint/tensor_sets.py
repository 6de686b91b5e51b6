"""Compare tensor names, dtypes and shapes with the exact sets of a plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from heapq import nsmallest

from spark_contract.orders import (
    BuildPlan,
    DonorShape,
    RequantizePlan,
    expand,
    expand_all,
    has_exactly,
)

from spark_checkpoint.errors import ValidationError
from spark_checkpoint.headers import SIXTEEN_BIT, Tensor

MTP_PREFIX = "mtp."
WEIGHT = ".weight"
SCALE = ".weight_scale_inv"
FP8 = "F8_E4M3"
HEAD = "lm_head.weight"
_PACKED = (".qweight", ".scales", ".qzeros")
_LISTED_NAMES = 10
_LONGEST_NAME = 120

# Likely causes of missing or unexpected names, by a part of the name.
_CAUSES = {
    ".linear_attn.": "the linear-attention projections are quantised differently: "
    "a different base generation",
    ".self_attn.": "the attention projections are quantised differently: "
    "a different base generation",
    ".shared_expert.": "the shared experts are quantised differently: "
    "already a hybrid, or a different base",
    ".mlp.experts.": "different number of experts or layers: a different model",
    "lm_head": "the head is quantised differently",
    ".visual.": "the vision tower differs: a text-only or other checkpoint",
}
_MTP_CAUSE = "the MTP tensors differ: lost by an earlier build, or quantised differently"
_NAMES_FIX = (
    "use the locked commits; `spark-deploy add --dry` lists the models that a repository fits, "
    "`spark-deploy add` serves it as published; if these are the commits of a shipped model, "
    "report this line to the project"
)
_FP8_FIX = "use the FP8 repositories of the same model"


def summarize_names(names: Iterable[str], limit: int = 4) -> str:
    """Return the largest groups of names that differ only in numbers: ``288 x a.{N}.b``."""
    counted = Counter(re.sub(r"\d+", "{N}", name) for name in names)
    largest = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{count} x {name}" for name, count in largest[:limit]]
    if len(counted) > limit:
        shown.append(f"{len(counted) - limit} more groups")
    return ", ".join(shown)


def list_names(names: Collection[str]) -> str:
    """Return the first names and the number of the rest."""
    shown = [
        name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        for name in nsmallest(_LISTED_NAMES, names)
    ]
    if len(names) > _LISTED_NAMES:
        shown.append(f"{len(names) - _LISTED_NAMES} more")
    return ", ".join(shown)


def check_same_names(
    where: str, subject: str, actual: Iterable[str], expected: Iterable[str]
) -> None:
    """Refuse different sets, with groups, first names and likely causes."""
    # Do not copy sets: a large model has 280,000 names.
    have = actual if isinstance(actual, Set) else set(actual)
    want = expected if isinstance(expected, Set) else set(expected)
    if have == want:
        return
    parts = [f"{subject}: {len(have)} names, expected {len(want)}"]
    missing, surplus = want - have, have - want
    if missing:
        parts.append(f"missing {len(missing)} ({summarize_names(missing)}): {list_names(missing)}")
    if surplus:
        parts.append(f"surplus {len(surplus)} ({summarize_names(surplus)}): {list_names(surplus)}")
    differing = missing | surplus
    mtp = {name for name in differing if name.startswith(MTP_PREFIX)}
    rest = differing - mtp
    causes = [cause for part, cause in _CAUSES.items() if any(part in name for name in rest)]
    causes += [_MTP_CAUSE] if mtp else []
    if causes:
        parts.append(f"likely {'; '.join(causes)}")
    raise ValidationError(where, ", ".join(parts), _NAMES_FIX)


def scale_name(weight_name: str) -> str:
    return weight_name.removesuffix(WEIGHT) + SCALE


def unmatched_donor_names(
    donor: Iterable[str], base: Container[str], swap: Iterable[str]
) -> set[str]:
    """Return donor names, outside routed experts, that neither base nor swap has."""
    swapped = {module + suffix for module in swap for suffix in (WEIGHT, SCALE)}
    outside = (name for name in donor if ".mlp.experts." not in name and name not in swapped)
    # MTP tensors always count as unmatched.
    return {name for name in outside if name not in base or name.startswith(MTP_PREFIX)}


def check_planned_shapes(
    shapes: Iterable[DonorShape], swap: Sequence[str], base: Mapping[str, Tensor]
) -> dict[str, DonorShape]:
    """Return the planned shapes by module; refuse other base shapes."""
    planned = {module: shape for shape in shapes for module in expand(shape.modules)}
    if planned:
        check_same_names("donor_shapes", "modules of the plan", planned, swap)
    for module, shape in planned.items():
        _check_shape(f"base {module}{WEIGHT}", base[module].shape, shape.weight)
    return planned


def check_donor_shapes(module: str, planned: DonorShape, weight: Tensor, scale: Tensor) -> None:
    _check_shape(f"donor {module}{WEIGHT}", weight.shape, planned.weight)
    _check_shape(f"donor {module}{SCALE}", scale.shape, planned.scale)


def _check_shape(where: str, actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if actual != expected:
        raise ValidationError(
            where,
            f"is {list(actual)}, the plan's donor_shapes require {list(expected)}",
            "use the repositories of this model's catalog file, or correct the file",
        )


def check_fp8_pair(
    where: str, shape: tuple[int, ...], weight: Tensor, scale: Tensor, block: tuple[int, int]
) -> None:
    if len(shape) != 2:
        raise ValidationError(where + WEIGHT, f"is {list(shape)}, expected a matrix", _FP8_FIX)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    for suffix, tensor, dtypes, expected in (
        (WEIGHT, weight, (FP8,), shape),
        (SCALE, scale, ("BF16", "F32"), grid),
    ):
        if tensor.dtype not in dtypes or tensor.shape != expected:
            raise ValidationError(
                f"{where}{suffix}",
                f"is {tensor.dtype} {list(tensor.shape)}, expected "
                f"{' or '.join(dtypes)} {list(expected)}",
                _FP8_FIX,
            )


def check_packable(name: str, tensor: Tensor, bits: int) -> None:
    reason, pack = "", 32 // bits
    if tensor.dtype not in SIXTEEN_BIT or len(tensor.shape) != 2:
        reason = f"is {tensor.dtype} {list(tensor.shape)}, expected a 16-bit matrix"
    elif tensor.shape[1] % 128:
        reason = f"has {tensor.shape[1]} inputs, not a multiple of the group of 128"
    elif name == HEAD and tensor.shape[0] % 64:
        reason = (
            f"has a vocabulary of {tensor.shape[0]}, not a multiple of 64: "
            "the engine pads it and the loader then fails on packed tensors"
        )
    elif tensor.shape[0] % pack:
        reason = f"has {tensor.shape[0]} outputs, not a multiple of {pack}"
    if reason:
        raise ValidationError(name, reason, "set head, shared_experts or drafter to keep")


def overlay_name(name: str) -> str:
    """Return a new tensor's name in an overlay; files with MTP tensors are rewritten instead."""
    if name.startswith(MTP_PREFIX):
        return name
    return name + ("_int8" if name.endswith(_PACKED) else "_fp8")


def replacement_names(plan: BuildPlan) -> dict[str, tuple[str, ...]]:
    """Return replaced name → names of new tensors."""
    suffixes = {"int8-g128": _PACKED, "fp8-donor": (WEIGHT, SCALE), "fp8-self": (WEIGHT, SCALE)}
    new = suffixes.get(plan.shared_experts, ())
    replaced = {
        module + WEIGHT: tuple(module + suffix for suffix in new)
        for module in (swapped_modules(plan) if new else ())
    }
    if plan.head == "int8-g128":
        replaced[HEAD] = tuple(HEAD.removesuffix(WEIGHT) + suffix for suffix in _PACKED)
    for name in drafter_weights(plan):
        replaced[name] = tuple(name.removesuffix(WEIGHT) + suffix for suffix in _PACKED)
    return replaced


def base_patterns(plan: BuildPlan) -> list[str]:
    patterns = list(plan.base_tensors)
    if plan.shared_experts == "fp8-base":
        patterns += [module + SCALE for module in swapped_modules(plan)]
    return patterns


def check_result_names(where: str, actual: Collection[str], plan: BuildPlan, layout: str) -> None:
    """Refuse other names than those of the plan's result.

    Names are expanded only for the error: they fill memory.
    """
    replaced = replacement_names(plan)
    new = {
        overlay_name(name) if layout == "overlay" else name
        for names in replaced.values()
        for name in names
    }
    patterns = [*base_patterns(plan), *plan.mtp_tensors]
    # Undo the replacements; the rest must be exactly the base's patterns.
    names = set(actual)
    has_all_new = new <= names
    names -= new
    if has_all_new and names.isdisjoint(replaced):
        names.update(replaced)
        if has_exactly(names, patterns):
            return
    expected = (expand_all(patterns) - replaced.keys()) | new
    check_same_names(where, "tensors of the plan's result", actual, expected)


def check_quantised_names(where: str, actual: Collection[str], plan: RequantizePlan) -> None:
    patterns = [*plan.base_tensors, *plan.mtp_tensors]
    if not has_exactly(set(actual), patterns):
        expected = expand_all(patterns)
        check_same_names(where, "tensors of the quantised checkpoint", actual, expected)


def swapped_modules(plan: BuildPlan) -> list[str]:
    return [module for pattern in plan.swap for module in expand(pattern)]


def drafter_weights(plan: BuildPlan) -> list[str]:
    """Return the 16-bit MTP weights that become INT4."""
    return [module + WEIGHT for pattern in plan.drafter_int4 for module in expand(pattern)]
