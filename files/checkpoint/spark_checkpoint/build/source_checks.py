"""Check the sources of a plan, and compare checkpoints with plans, from headers."""

import hashlib
import re
from collections.abc import Container, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from spark_contract.builder_api import (
    BuildPlan,
    DonorDir,
    DonorShape,
    DonorUrl,
    SourceCounts,
    count_names,
    expand_all,
    remove_exact_matches,
)

from spark_checkpoint import ValidationError
from spark_checkpoint.build.layouts import check_config
from spark_checkpoint.build.write import NewTensor
from spark_checkpoint.directory import (
    CONFIG_NAME,
    Checkpoint,
    Span,
    checkpoint_from_headers,
    natural_sort_key,
)
from spark_checkpoint.headers import SIXTEEN_BIT, Tensor
from spark_checkpoint.inspection import InspectedCheckpoint, original_name, used_tensors
from spark_checkpoint.sources.donor import DirDonor, Donor, UrlDonor
from spark_checkpoint.storage import read_buffers
from spark_checkpoint.tensor_sets import (
    FP8,
    HEAD,
    MTP_PREFIX,
    SCALE,
    WEIGHT,
    base_patterns,
    check_donor_shapes,
    check_fp8_weight,
    check_packable,
    check_planned_shapes,
    check_result_names,
    check_same_names,
    drafter_weights,
    list_names,
    planned_shapes,
    replacement_names,
    scale_name,
    swapped_modules,
    unmatched_donor_names,
)

_EMBEDDING = "model.language_model.embed_tokens.weight"
_FIX = "download the FP8 source again, or use the FP8 repository of the same model"

# Shapes of MTP tensors as multiples of sizes in config.json; the key "" accepts any size.
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


class Sources(NamedTuple):
    base: Checkpoint
    donor: Donor | None
    modules: list[str]  # modules to compare or replace
    mtp_missing: list[str]  # MTP names that the base lacks


def check_sources(plan: BuildPlan, base: Checkpoint, config: Mapping[str, Any]) -> Sources:
    """Return base and donor; raise ValidationError if they do not match the plan."""
    modules = swapped_modules(plan)
    mtp_missing = check_base_names(plan, base, modules)
    _check_counts(base, config)
    for module in modules:
        name = module + WEIGHT
        weight = base.tensor(name)
        if plan.shared_experts == "fp8-base":
            scale = base.tensor(module + SCALE)
            check_fp8_weight(f"base {module}", weight.shape, weight, scale, plan.block_shape)
        elif plan.shared_experts != "keep":
            is_matrix = len(weight.shape) == 2 and weight.size_bytes
            if weight.dtype not in SIXTEEN_BIT or not is_matrix:
                actual = f"{name} is {weight.dtype} {list(weight.shape)}"
                problem = f"{actual}, expected a 16-bit matrix"
                fix = "use a base with 16-bit shared experts"
                raise ValidationError(str(base.directory), problem, fix)
            if plan.shared_experts == "int8-g128":
                check_packable(name, weight, bits=8)
    if plan.head == "int8-g128":
        check_packable(HEAD, base.tensor(HEAD), bits=8)
    _check_drafter(plan, base, mtp_missing)
    donor = None
    if plan.donor is not None and (plan.compares_with_donor or mtp_missing):
        donor = _open_donor(plan, plan.donor, base, config, modules, mtp_missing)
    elif mtp_missing:
        raise ValidationError(
            str(base.directory),
            f"lacks {len(mtp_missing)} MTP tensors, but the plan has no FP8 source for them: "
            f"{list_names(mtp_missing)}",
            "use a profile with an FP8 source, or a base with MTP tensors",
        )
    return Sources(base, donor, modules, mtp_missing)


_COUNTED = {
    "num_hidden_layers": re.compile(r"model\.language_model\.layers\.(\d+)\."),
    "num_experts": re.compile(r"model\.language_model\.layers\.0\.mlp\.experts\.(\d+)\."),
}


def _check_counts(base: Checkpoint, config: Mapping[str, Any]) -> None:
    """Compare counts in config.json with the base's tensor names, which already match the plan."""
    sizes = read_sizes(base, config)
    for key, pattern in _COUNTED.items():
        count = len({match[1] for name in base.owner if (match := pattern.match(name))})
        if sizes.get(key, count) != count:
            problem = f"{key} is {sizes[key]}, but the tensors in the model file are for {count}"
            fix = "download the base again, or correct `tensors` in the model file"
            raise ValidationError(f"{base.directory}/config.json", problem, fix)


def _check_drafter(plan: BuildPlan, base: Checkpoint, mtp_missing: Sequence[str]) -> None:
    weights = set(drafter_weights(plan))
    if weights:
        present = weights & expand_all(plan.mtp_tensors)
        check_same_names("drafter_int4", "MTP weights to round", present, weights)
    for name in weights.difference(mtp_missing):
        check_packable(name, base.tensor(name), bits=4)


def required_donor_tensors(plan: BuildPlan, sources: Sources) -> dict[str, Tensor]:
    if sources.donor is None:
        return {}
    names = list(sources.mtp_missing)
    scales = map(scale_name, sources.mtp_missing)
    names += [scale for scale in scales if scale in sources.donor.names]
    if plan.compares_with_donor:
        names += [module + suffix for module in sources.modules for suffix in (WEIGHT, SCALE)]
    return sources.donor.tensors(names)


def check_base_names(plan: BuildPlan, base: Checkpoint, modules: list[str]) -> list[str]:
    """Return the missing MTP names; raise ValidationError if other names differ from the plan.

    The base's patterns are expanded only for an error message, because the names take much memory.
    """
    names, where = base.owner.keys(), str(base.directory)
    patterns = base_patterns(plan)
    mtp_present = {name for name in names if name.startswith(MTP_PREFIX)}
    if not remove_exact_matches({name for name in names if name not in mtp_present}, patterns):
        check_same_names(where, "base tensors", names - mtp_present, expand_all(patterns))
    mtp_expected = expand_all(plan.mtp_tensors)
    if mtp_present - mtp_expected:
        check_same_names(where, "MTP tensors", mtp_present, mtp_expected)
    missing = [module for module in modules if module + WEIGHT not in base.owner]
    if missing or len(set(modules)) != len(modules):
        check_same_names(where, "modules to swap", set(modules) - set(missing), modules)
    return sorted(mtp_expected - mtp_present)


def _open_donor(
    plan: BuildPlan,
    source: DonorDir | DonorUrl,
    base: Checkpoint,
    config: Mapping[str, Any],
    modules: list[str],
    mtp_missing: list[str],
) -> Donor:
    weights = {module: base.tensor(module + WEIGHT) for module in modules}
    planned = check_planned_shapes(plan, weights)
    donor: Donor
    if isinstance(source, DonorUrl):
        donor, where = UrlDonor(source), source.url
    else:
        donor, where = DirDonor(Path(source.dir)), source.dir
    needed = _check_donor_names(where, plan, donor.names, base.owner)
    graftable = donor.names.intersection(mtp_missing)
    check_same_names(where, "MTP tensors to graft", graftable, mtp_missing)
    if mtp_missing:
        scales = [scale for scale in map(scale_name, mtp_missing) if scale in donor.names]
        entries = donor.tensors([*mtp_missing, *scales])
        check_graftable(mtp_missing, entries, read_sizes(base, config), plan.block_shape)
    if plan.compares_with_donor:
        shapes = {module: weight.shape for module, weight in weights.items()}
        _check_donor_weights(plan, donor.tensors(needed), shapes, planned)
    return donor


def _check_donor_names(
    where: str, plan: BuildPlan, names: Set[str], base: Container[str]
) -> list[str]:
    """Return the names of the donor's weights and scales that the plan compares or uses."""
    modules = swapped_modules(plan)
    needed = [module + suffix for module in modules for suffix in (WEIGHT, SCALE)]
    if plan.compares_with_donor:
        check_same_names(where, "weights and scales of the FP8 source", names & set(needed), needed)
    unmatched = unmatched_donor_names(names, base, modules)
    expected = expand_all(plan.donor_unmatched)
    check_same_names(where, "names in the FP8 source that the base lacks", unmatched, expected)
    return needed


def _check_donor_weights(
    plan: BuildPlan,
    entries: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    planned: Mapping[str, DonorShape],
) -> None:
    for module, shape in shapes.items():
        weight, scale = entries[module + WEIGHT], entries[module + SCALE]
        if planned:
            check_donor_shapes(module, planned[module], weight, scale)
        check_fp8_weight(f"donor {module}", shape, weight, scale, plan.block_shape)


def read_sizes(base: Checkpoint, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in config.json; the embedding's width is the default hidden size."""
    sizes = {"1": 1}  # the key in _ONE
    if _EMBEDDING in base.owner:
        sizes["hidden_size"] = base.tensor(_EMBEDDING).shape[-1]
    text = config.get("text_config")
    for section in (config, text if isinstance(text, Mapping) else {}):
        sizes |= {key: size for key, size in section.items() if type(size) is int and size > 0}
    return sizes


def hash_tensors(tensors: Mapping[str, Tensor | NewTensor], spans: Mapping[str, Span]) -> str:
    """Return a hash of names, dtypes, shapes and bytes, regardless of the files they are in."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\n".encode())
        for buffer in read_buffers(*spans[name]):
            hasher.update(buffer)
    return hasher.hexdigest()


def check_graftable(
    names: Sequence[str],
    entries: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    block: tuple[int, int],
) -> None:
    """Check dtypes and shapes of MTP tensors to graft."""
    for name in names:
        where, entry = f"donor {name}", entries[name]
        if entry.dtype == FP8:
            if scale_name(name) not in entries:
                raise ValidationError(where, "is FP8 without block scales", _FIX)
            scale = entries[scale_name(name)]
            check_fp8_weight(where.removesuffix(WEIGHT), entry.shape, entry, scale, block)
        elif entry.dtype not in SIXTEEN_BIT:
            problem = f"is {entry.dtype}, expected {FP8} or a 16-bit floating-point dtype"
            raise ValidationError(where, problem, _FIX)
        multiples = next((shape for pattern, shape in _SHAPES if re.fullmatch(pattern, name)), None)
        if multiples is None:
            continue
        # None accepts any size.
        expected = [factor * sizes[key] if key in sizes else None for factor, key in multiples]
        is_same = len(entry.shape) == len(expected) and all(
            size in (None, actual) for actual, size in zip(entry.shape, expected, strict=True)
        )
        if not is_same:
            text = ", ".join("any" if size is None else str(size) for size in expected)
            raise ValidationError(where, f"is {list(entry.shape)}, expected [{text}]", _FIX)


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
    """Check base and donor as a build does, but read only headers."""
    check_config(checkpoint.config, f"{checkpoint.source}: {CONFIG_NAME}", plan)
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
    """Return whether a checkpoint matches the relevant part of a plan, and why."""
    part = _PARTS.get(plan.shared_experts, plan.shared_experts)
    match = _match_donor if part == "donor" else match_plan_names
    try:
        why = match(checkpoint, plan)
    except ValidationError as error:
        return {"plan": plan.name, "part": part, "fits": False, "why": error.what}
    return {"plan": plan.name, "part": part, "fits": True, "why": why}


def _match_donor(checkpoint: InspectedCheckpoint, plan: BuildPlan) -> str:
    """Compare a checkpoint with the donor of a plan; the base is assumed to match."""
    tensors, _ = used_tensors(checkpoint.shards)
    base = expand_all([*base_patterns(plan), *plan.mtp_tensors])
    _check_donor_names(checkpoint.source, plan, tensors.keys(), base)
    planned = planned_shapes(plan)
    _check_donor_weights(plan, tensors, {name: planned[name].weight for name in planned}, planned)
    return f"the plan's FP8 source, with {len(swapped_modules(plan))} modules"


def match_plan_names(checkpoint: InspectedCheckpoint, plan: BuildPlan) -> str:
    """Describe a checkpoint that is the base or the result of a plan.

    Raise ValidationError for any other checkpoint.
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
    new = {name for new_names in replacement_names(plan).values() for name in new_names}
    expected = expand_all(base_patterns(plan))
    is_overlay = any(name != original_name(name) for name in names)
    if is_overlay or not (new - expected).isdisjoint(names):
        check_result_names(checkpoint.source, names, plan, "overlay" if is_overlay else "full")
        return f"a {_KINDS[plan.shared_experts]} with the names in the plan"
    mtp = expand_all(plan.mtp_tensors)
    present_mtp = {name for name in names if name.startswith(MTP_PREFIX)}
    check_same_names(checkpoint.source, "base tensors", names - present_mtp, expected)
    if present_mtp - mtp:
        check_same_names(checkpoint.source, "MTP tensors", present_mtp, mtp)
    missing = len(mtp - present_mtp)
    return f"the plan's base, which lacks {missing} MTP tensors" if missing else "the plan's base"
