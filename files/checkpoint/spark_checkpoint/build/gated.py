"""Base and donor of a plan, held against it by their headers alone: no byte of weights is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_contract.orders import BuildPlan, DonorUrl
from spark_contract.patterns import expand_all, uses_up

from spark_checkpoint.build.tensors.mtp_shapes import graftable, model_sizes
from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.groups import listed
from spark_checkpoint.format.index import Tensor
from spark_checkpoint.format.tree import Tree
from spark_checkpoint.sources.donor import Donor, open_donor
from spark_checkpoint.verify.expected import HEAD, base_patterns, swapped
from spark_checkpoint.verify.gates import (
    MTP_PREFIX,
    SCALE,
    WEIGHT,
    donor_as_planned,
    donor_unmatched,
    fp8_fits,
    packable,
    planned_shapes,
    same_names,
    scale_of,
    swappable,
)


@dataclass(frozen=True, slots=True)
class Gated:
    """Sources that passed: what a build takes, and what it takes from where."""

    base: Tree
    donor: Donor | None
    modules: list[str]  # whose weights are compared or replaced
    mtp_missing: list[str]  # MTP names that the base lacks


def gate(plan: BuildPlan, base: Tree, config: Mapping[str, Any]) -> Gated:
    """Hold a base with its config.json, and the plan's donor, against the plan's exact sets."""
    modules = swapped(plan)
    mtp_missing = _gate_base_names(plan, base, modules)
    if plan.shared_experts == "fp8-base":
        for module in modules:
            weight, scale = base.tensor(module + WEIGHT), base.tensor(module + SCALE)
            fp8_fits(f"base {module}", weight.shape, weight, scale, plan.block_shape)
    elif plan.shared_experts != "keep":
        swappable(base.directory, {m + WEIGHT: base.tensor(m + WEIGHT) for m in modules})
    if plan.shared_experts == "int8-g128":
        for module in modules:
            packable(module + WEIGHT, base.tensor(module + WEIGHT), head=False)
    if plan.head == "int8-g128":
        packable(HEAD, base.tensor(HEAD), head=True)
    donor = _open_donor(plan, base, config, modules, mtp_missing)
    return Gated(base, donor, modules, mtp_missing)


def donor_tensors(plan: BuildPlan, sources: Gated) -> dict[str, Tensor]:
    """Return the donor's tensors that this plan takes or compares."""
    if sources.donor is None:
        return {}
    names = list(sources.mtp_missing)
    names += [s for s in map(scale_of, sources.mtp_missing) if s in sources.donor.names]
    if plan.compares_with_donor:
        names += [module + suffix for module in sources.modules for suffix in (WEIGHT, SCALE)]
    return sources.donor.tensors(names)


def _gate_base_names(plan: BuildPlan, base: Tree, modules: list[str]) -> list[str]:
    """Refuse a base with other names than the plan's; return the MTP names it lacks.

    A large model's expected names fill memory: they are only all made for the refusal.
    """
    names, where = base.owner.keys(), str(base.directory)
    patterns = base_patterns(plan)
    mtp_found = {name for name in names if name.startswith(MTP_PREFIX)}
    if not uses_up({name for name in names if name not in mtp_found}, patterns):
        same_names(where, "base tensors", names - mtp_found, expand_all(patterns))
    mtp_expected = expand_all(plan.mtp_tensors)
    if mtp_found - mtp_expected:
        same_names(where, "MTP tensors", mtp_found, mtp_expected)
    absent = [module for module in modules if module + WEIGHT not in base.owner]
    if absent or len(set(modules)) != len(modules):
        same_names(where, "modules to swap", set(modules) - set(absent), modules)
    return sorted(mtp_expected - mtp_found)


def _open_donor(
    plan: BuildPlan,
    base: Tree,
    config: Mapping[str, Any],
    modules: list[str],
    mtp_missing: list[str],
) -> Donor | None:
    if plan.donor is None or (not plan.compares_with_donor and not mtp_missing):
        if mtp_missing:
            raise GateRefused(
                str(base.directory),
                f"lacks {len(mtp_missing)} MTP tensors and there is no donor to graft them from: "
                f"{listed(mtp_missing)}",
                "plan a donor, or use a base that has them",
            )
        return None
    planned = planned_shapes(
        plan.donor_shapes, modules, {m: base.tensor(m + WEIGHT) for m in modules}
    )
    donor = open_donor(plan.donor)
    where = plan.donor.url if isinstance(plan.donor, DonorUrl) else plan.donor.dir
    needed = [m + s for m in modules for s in (WEIGHT, SCALE)]
    if plan.compares_with_donor:
        have = donor.names.intersection(needed)
        same_names(where, "donor weights and scales", have, needed)
    same_names(
        where,
        "donor names without a partner",
        donor_unmatched(donor.names, base.owner, modules),
        expand_all(plan.donor_unmatched),
    )
    same_names(where, "MTP tensors to graft", donor.names.intersection(mtp_missing), mtp_missing)
    if mtp_missing:
        sizes = model_sizes(base, config)
        graftable(mtp_missing, donor, sizes, plan.block_shape)
    if plan.compares_with_donor:
        entries = donor.tensors(needed)
        for module in modules:
            weight, scale = entries[module + WEIGHT], entries[module + SCALE]
            if planned:
                donor_as_planned(module, planned[module], weight, scale)
            shape = base.tensor(module + WEIGHT).shape
            fp8_fits(f"donor {module}", shape, weight, scale, plan.block_shape)
    return donor
