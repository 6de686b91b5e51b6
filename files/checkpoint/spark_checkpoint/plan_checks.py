"""Compare a checkpoint or repository with build plans, from headers."""

from pathlib import Path
from typing import Any

from spark_contract.builder_api import BuildPlan, SourceCounts, count_names, expand, expand_all

from spark_checkpoint import tensor_sets
from spark_checkpoint.build.layouts import check_config
from spark_checkpoint.build.source_checks import check_sources, required_donor_tensors
from spark_checkpoint.directory import CONFIG_NAME, checkpoint_from_headers, natural_sort_key
from spark_checkpoint.errors import ValidationError
from spark_checkpoint.inspection import InspectedCheckpoint, original_name, used_tensors

# For each setting of shared experts, the part of the plan to compare with and the kind of result.
_PARTS = {"keep": "base", "fp8-base": "hybrid", "fp8-donor": "donor"}
_KINDS = {
    "fp8-donor": "hybrid",
    "fp8-self": "hybrid",
    "fp8-base": "hybrid",
    "int8-g128": "checkpoint with INT8 shared experts",
    "keep": "checkpoint with the base's shared experts",
}


def check_sources_by_headers(checkpoint: InspectedCheckpoint, plan: BuildPlan) -> SourceCounts:
    """Check base and donor as a build does, from headers only."""
    check_config(checkpoint.config, f"{checkpoint.source}: {CONFIG_NAME}", plan.head)
    shards = {
        name: checkpoint.shards[name] for name in sorted(checkpoint.shards, key=natural_sort_key)
    }
    base = checkpoint_from_headers(Path(checkpoint.source), shards, checkpoint.index)
    sources = check_sources(plan, base, checkpoint.config)
    required_donor_tensors(plan, sources)  # reads and validates the donor's headers
    return SourceCounts(
        base_tensors=len(base.owner),
        donor_tensors=len(sources.donor.names) if sources.donor else 0,
        swapped_modules=len(sources.modules),
        mtp_tensors=sum(map(count_names, plan.mtp_tensors)),
        mtp_from_donor=len(sources.mtp_missing),
    )


def match_plan(checkpoint: InspectedCheckpoint, plan: BuildPlan) -> dict[str, Any]:
    """Return whether a checkpoint matches a part of a plan, and the reason."""
    part = _PARTS.get(plan.shared_experts, plan.shared_experts)
    try:
        why = (
            _match_donor(checkpoint, plan)
            if part == "donor"
            else match_plan_names(checkpoint, plan)
        )
    except ValidationError as error:
        return {"plan": plan.name, "part": part, "fits": False, "why": error.what}
    return {"plan": plan.name, "part": part, "fits": True, "why": why}


def _match_donor(checkpoint: InspectedCheckpoint, plan: BuildPlan) -> str:
    """Compare a checkpoint with the donor of a plan; the base is assumed to match."""
    tensors, _ = used_tensors(checkpoint.shards)
    modules = tensor_sets.swapped_modules(plan)
    needed = [
        module + suffix for module in modules for suffix in (tensor_sets.WEIGHT, tensor_sets.SCALE)
    ]
    present = tensors.keys() & set(needed)
    tensor_sets.check_same_names(checkpoint.source, "donor weights and scales", present, needed)
    base = expand_all([*tensor_sets.base_patterns(plan), *plan.mtp_tensors])
    tensor_sets.check_same_names(
        checkpoint.source,
        "donor names that the base lacks",
        tensor_sets.unmatched_donor_names(tensors, base, modules),
        expand_all(plan.donor_unmatched),
    )
    for planned in plan.donor_shapes:
        for module in expand(planned.modules):
            weight, scale = (
                tensors[module + tensor_sets.WEIGHT],
                tensors[module + tensor_sets.SCALE],
            )
            tensor_sets.check_donor_shapes(module, planned, weight, scale)
            tensor_sets.check_fp8_weight(
                f"donor {module}", planned.weight, weight, scale, plan.block_shape
            )
    return f"the plan's donor, with {len(modules)} modules"


def match_plan_names(checkpoint: InspectedCheckpoint, plan: BuildPlan) -> str:
    """Return a text that states whether a checkpoint is the base or the result of a plan.

    Raise ValidationError if it is neither.
    """
    if checkpoint.index:
        # Shards of an overlay still have the replaced tensors, but an engine loads only the index.
        names = {
            name
            for name, shard in checkpoint.index.items()
            if shard in checkpoint.shards and name in checkpoint.shards[shard].tensors
        }
    else:
        names = set(used_tensors(checkpoint.shards)[0])
    new = {name for new_names in tensor_sets.replacement_names(plan).values() for name in new_names}
    expected = expand_all(tensor_sets.base_patterns(plan))
    is_overlay = any(name != original_name(name) for name in names)
    if is_overlay or not (new - expected).isdisjoint(names):
        tensor_sets.check_result_names(
            checkpoint.source, names, plan, "overlay" if is_overlay else "full"
        )
        return f"a {_KINDS[plan.shared_experts]} with exactly the plan's names"
    mtp = expand_all(plan.mtp_tensors)
    present_mtp = {name for name in names if name.startswith(tensor_sets.MTP_PREFIX)}
    tensor_sets.check_same_names(checkpoint.source, "base tensors", names - present_mtp, expected)
    if present_mtp - mtp:
        tensor_sets.check_same_names(checkpoint.source, "MTP tensors", present_mtp, mtp)
    missing = len(mtp - present_mtp)
    return f"the plan's base ({missing} MTP tensors to graft)" if missing else "the plan's base"
