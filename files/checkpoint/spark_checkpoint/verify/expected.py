"""The exact names a plan's result has in either layout: what trees are compared with."""

from __future__ import annotations

from collections.abc import Collection

from spark_contract.orders import BuildPlan, RequantizePlan
from spark_contract.patterns import expand, expand_all, uses_up

from spark_checkpoint.verify.gates import SCALE, WEIGHT, same_names

HEAD = "lm_head.weight"
_PACKED = (".qweight", ".scales", ".qzeros")


def overlay_name(name: str) -> str:
    """Return the name a replacement has in an overlay, where the base's own name still exists."""
    suffix = "_int8" if name.endswith(_PACKED) else "_fp8"
    return name + suffix


def replacements(plan: BuildPlan) -> dict[str, tuple[str, ...]]:
    """Return for each base name that is replaced the plain names that stand in for it."""
    found: dict[str, tuple[str, ...]] = {}
    suffixes = {"int8-g128": _PACKED, "fp8-donor": (WEIGHT, SCALE), "fp8-self": (WEIGHT, SCALE)}
    for module in swapped(plan) if plan.shared_experts in suffixes else ():
        new = suffixes[plan.shared_experts]
        found[module + WEIGHT] = tuple(module + suffix for suffix in new)
    if plan.head == "int8-g128":
        found[HEAD] = tuple(HEAD.removesuffix(WEIGHT) + suffix for suffix in _PACKED)
    return found


def base_patterns(plan: BuildPlan) -> list[str]:
    """Return patterns of the base's names outside mtp.*; a ready hybrid has scales as well."""
    patterns = list(plan.base_tensors)
    if plan.shared_experts == "fp8-base":
        patterns += [module + SCALE for module in swapped(plan)]
    return patterns


def exact_result(where: str, found: Collection[str], plan: BuildPlan, layout: str) -> None:
    """Refuse unless ``found`` are exactly the names of the plan's result in ``layout``.

    A large model's expected names fill memory: they are only all made for the refusal.
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
    same_names(where, "tensors of the plan's result", found, expected)


def exact_names(where: str, found: Collection[str], plan: RequantizePlan) -> None:
    """Refuse unless ``found`` are exactly the names of a quantised tree."""
    patterns = [*plan.base_tensors, *plan.mtp_tensors]
    if not uses_up(set(found), patterns):
        same_names(where, "tensors of the quantised tree", found, expand_all(patterns))


def swapped(plan: BuildPlan) -> list[str]:
    """Return the modules whose weights are replaced."""
    return [module for pattern in plan.swap for module in expand(pattern)]
