"""Says of which plans a subject could be a part: as base, as hybrid or as donor."""

from __future__ import annotations

from typing import Any

from spark_contract.work.orders import BuildPlan
from spark_contract.work.patterns import expand, expand_all

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.inspect.inspection import Subject, hold_against
from spark_checkpoint.verify.expected import base_patterns, swapped
from spark_checkpoint.verify.gates import (
    SCALE,
    WEIGHT,
    donor_as_planned,
    donor_unmatched,
    fp8_fits,
    same_names,
)

_PARTS = {"keep": "base", "fp8-base": "hybrid", "fp8-donor": "donor"}


def fits(subject: Subject, plan: BuildPlan) -> dict[str, Any]:
    """Return as what the subject was held against a plan, whether it fits, and why."""
    part = _PARTS.get(plan.shared_experts, plan.shared_experts)
    try:
        said = _as_donor(subject, plan) if part == "donor" else hold_against(subject, plan)
    except GateRefused as error:
        return {"plan": plan.name, "part": part, "fits": False, "why": error.what}
    return {"plan": plan.name, "part": part, "fits": True, "why": said}


def _as_donor(subject: Subject, plan: BuildPlan) -> str:
    """Hold a subject against what a plan wants of its donor; the base is what the plan says."""
    tensors = {
        name: one for header in subject.shards.values() for name, one in header.tensors.items()
    }
    modules = swapped(plan)
    needed = [module + suffix for module in modules for suffix in (WEIGHT, SCALE)]
    same_names(subject.place, "donor weights and scales", tensors.keys() & set(needed), needed)
    base = expand_all([*base_patterns(plan), *plan.mtp_tensors])
    same_names(
        subject.place,
        "donor names without a partner",
        donor_unmatched(tensors, base, modules),
        expand_all(plan.donor_unmatched),
    )
    for part in plan.donor_shapes:
        for module in expand(part.modules):
            weight, scale = tensors[module + WEIGHT], tensors[module + SCALE]
            donor_as_planned(module, part, weight, scale)
            fp8_fits(f"donor {module}", part.weight, weight, scale, plan.block_shape)
    return f"the plan's donor of {len(modules)} modules"
