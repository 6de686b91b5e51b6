"""Compare the names, dtypes and shapes of tensors with a plan."""

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Set
from heapq import nsmallest
from itertools import chain

from spark_contract.builder_api import (
    BuildPlan,
    DonorShape,
    RequantizePlan,
    expand,
    expand_all,
    remove_exact_matches,
)

from spark_checkpoint import ValidationError
from spark_checkpoint.headers import SIXTEEN_BIT, Tensor

MTP_PREFIX = "mtp."
WEIGHT = ".weight"
SCALE = ".weight_scale_inv"
FP8 = "F8_E4M3"
HEAD = "lm_head.weight"
OVERLAY_SHARD = "model-spark-overlay.safetensors"
NGRAM_TABLE = ".ple_embedding.ngram_embedding."
_PACKED = (".qweight", ".scales", ".qzeros")
_LISTED_NAMES = 10
_MAX_NAME_LENGTH = 120

# Likely causes of missing or surplus names that contain these strings.
_CAUSES = {
    ".linear_attn.": "the linear-attention projections are quantized differently, "
    "as in another version of the base",
    ".self_attn.": "the attention projections are quantized differently, "
    "as in another version of the base",
    ".shared_expert.": "the shared experts are quantized differently, "
    "as in a hybrid or in another base",
    ".mlp.experts.": "the number of experts or layers does not match this model",
    "lm_head": "the head is quantized differently",
    ".visual.": "the vision tower is different or missing, as in a text-only checkpoint",
}
_MTP_CAUSE = "the MTP tensors are quantized differently, or an earlier build lost them"
_NAMES_FIX = (
    "use the locked commits, or use `spark-deploy add` to serve the repository as published "
    "(`add --dry` lists the models that match the repository); "
    "if you already use the commits of a shipped model, open an issue that quotes this message"
)
_FP8_FIX = "use the FP8 repositories of the same model"


def summarize_names(names: Iterable[str], limit: int = 4) -> str:
    """Describe the largest groups of names that differ only in numbers: ``288 x a.{N}.b``."""
    counts = Counter(re.sub(r"\d+", "{N}", name) for name in names)
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    texts = [f"{count} x {name}" for name, count in largest[:limit]]
    if len(counts) > limit:
        texts.append(f"{len(counts) - limit} more groups")
    return ", ".join(texts)


def list_names(names: Collection[str]) -> str:
    """List the first names and the number of the remaining ones."""
    texts = [
        name if len(name) <= _MAX_NAME_LENGTH else f"{name[:_MAX_NAME_LENGTH]}..."
        for name in nsmallest(_LISTED_NAMES, names)
    ]
    if len(names) > _LISTED_NAMES:
        texts.append(f"{len(names) - _LISTED_NAMES} more")
    return ", ".join(texts)


def check_same_names(
    where: str, subject: str, actual: Iterable[str], expected: Iterable[str]
) -> None:
    """Raise ValidationError if the names differ; list the differences and their likely causes."""
    # Do not copy sets, because a large model has 280,000 names.
    actual = actual if isinstance(actual, Set) else set(actual)
    expected = expected if isinstance(expected, Set) else set(expected)
    if actual == expected:
        return
    texts = [f"{subject}: {len(actual)} names, expected {len(expected)}"]
    for kind, names in (("missing", expected - actual), ("surplus", actual - expected)):
        if names:
            texts.append(f"{kind} {len(names)} ({summarize_names(names)}): {list_names(names)}")
    mtp = {name for name in actual ^ expected if name.startswith(MTP_PREFIX)}
    others = (actual ^ expected) - mtp
    causes = [cause for part, cause in _CAUSES.items() if any(part in name for name in others)]
    causes += [_MTP_CAUSE] if mtp else []
    if causes:
        texts.append(f"likely {'; '.join(causes)}")
    raise ValidationError(where, ", ".join(texts), _NAMES_FIX)


def scale_name(weight_name: str) -> str:
    return weight_name.removesuffix(WEIGHT) + SCALE


def unmatched_donor_names(
    donor: Iterable[str], base: Container[str], swap: Iterable[str]
) -> set[str]:
    """Return the donor's names that are neither in the base nor in swapped modules.

    Routed experts are left out. MTP tensors count as missing from the base.
    """
    swapped = {module + suffix for module in swap for suffix in (WEIGHT, SCALE)}
    return {
        name
        for name in donor
        if ".mlp.experts." not in name
        and name not in swapped
        and (name not in base or name.startswith(MTP_PREFIX))
    }


def planned_shapes(plan: BuildPlan) -> dict[str, DonorShape]:
    return {module: shape for shape in plan.donor_shapes for module in expand(shape.modules)}


def check_planned_shapes(plan: BuildPlan, base: Mapping[str, Tensor]) -> dict[str, DonorShape]:
    """Check that the base has the planned shapes, and return them by module."""
    planned = planned_shapes(plan)
    if planned:
        check_same_names("donor_shapes", "modules of the plan", planned, base)
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
            f"has shape {list(actual)}, but the plan's donor_shapes require {list(expected)}",
            "use the repositories listed in the catalog's model file, "
            "or correct donor_shapes in that file",
        )


def block_grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of block rows and block columns in a matrix."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def check_fp8_weight(
    where: str, shape: tuple[int, ...], weight: Tensor, scale: Tensor, block: tuple[int, int]
) -> None:
    """Check an FP8 weight, which must have ``shape``, and the scales of its blocks."""
    if len(shape) != 2:
        raise ValidationError(where + WEIGHT, f"is {list(shape)}, expected a matrix", _FP8_FIX)
    for suffix, tensor, dtypes, expected in (
        (WEIGHT, weight, (FP8,), shape),
        (SCALE, scale, ("BF16", "F32"), block_grid(shape, block)),
    ):
        if tensor.dtype not in dtypes or tensor.shape != expected:
            problem = (
                f"is {tensor.dtype} {list(tensor.shape)}, "
                f"expected {' or '.join(dtypes)} {list(expected)}"
            )
            raise ValidationError(f"{where}{suffix}", problem, _FP8_FIX)


def check_packable(name: str, tensor: Tensor, bits: int) -> None:
    """Raise ValidationError if a weight cannot be packed with this number of bits per value."""
    codes_per_word = 32 // bits
    reason = ""
    if tensor.dtype not in SIXTEEN_BIT or len(tensor.shape) != 2 or not tensor.size_bytes:
        reason = f"is {tensor.dtype} {list(tensor.shape)}, expected a 16-bit matrix"
    elif tensor.shape[1] % 128:
        reason = f"has {tensor.shape[1]} inputs, expected a multiple of the group size 128"
    elif name == HEAD and tensor.shape[0] % 64:
        reason = (
            f"has a vocabulary of {tensor.shape[0]} tokens, which is not a multiple of 64; "
            "the engine would pad the head, but it cannot pad a packed tensor"
        )
    elif tensor.shape[0] % codes_per_word:
        reason = f"has {tensor.shape[0]} outputs, expected a multiple of {codes_per_word}"
    if reason:
        raise ValidationError(name, reason, "set head, shared_experts or drafter to `keep`")


def overlay_name(name: str) -> str:
    """Add a suffix to the name of a new tensor, because an overlay keeps the base's tensor, too.

    MTP tensors get no suffix, because their files are rewritten.
    """
    if name.startswith(MTP_PREFIX):
        return name
    return name + ("_int8" if name.endswith(_PACKED) else "_fp8")


def replacement_names(plan: BuildPlan) -> dict[str, tuple[str, ...]]:
    """Map each replaced tensor to the names of its new tensors, or to () if it is removed."""
    suffixes: dict[str, tuple[str, ...]] = {}
    if plan.shared_experts == "int8-g128":
        suffixes.update({module + WEIGHT: _PACKED for module in swapped_modules(plan)})
    elif plan.shared_experts in ("fp8-donor", "fp8-self"):
        suffixes.update({module + WEIGHT: (WEIGHT, SCALE) for module in swapped_modules(plan)})
    if plan.head == "int8-g128":
        suffixes[HEAD] = _PACKED
    suffixes.update({name: _PACKED for name in drafter_weights(plan)})
    if plan.ngram_table != "keep":
        tables = (pattern for pattern in plan.base_tensors if NGRAM_TABLE in pattern)
        suffixes.update({name: () for pattern in tables for name in expand(pattern)})
    return {
        name: tuple(name.removesuffix(WEIGHT) + suffix for suffix in new_suffixes)
        for name, new_suffixes in suffixes.items()
    }


def base_patterns(plan: BuildPlan) -> list[str]:
    """Return patterns for all tensor names of the base checkpoint except the MTP layer's."""
    patterns = list(plan.base_tensors)
    if plan.shared_experts == "fp8-base":
        patterns += [module + SCALE for module in swapped_modules(plan)]
    return patterns


def check_result_names(where: str, actual: Collection[str], plan: BuildPlan, layout: str) -> None:
    """Raise ValidationError unless the names are those of the plan's result.

    All expected names are listed only for the error, because they take much memory.
    """
    replaced = replacement_names(plan)
    new = set(chain.from_iterable(replaced.values()))
    if layout == "overlay":
        new = set(map(overlay_name, new))
    patterns = [*base_patterns(plan), *plan.mtp_tensors]
    # After undoing the replacements, the names must be those of the base.
    names = set(actual)
    has_all_new = new <= names
    names -= new
    if has_all_new and names.isdisjoint(replaced):
        names.update(replaced)
        if remove_exact_matches(names, patterns):
            return
    expected = (expand_all(patterns) - replaced.keys()) | new
    check_same_names(where, "tensors of the plan's result", actual, expected)


def check_quantized_names(where: str, actual: Collection[str], plan: RequantizePlan) -> None:
    patterns = [*plan.base_tensors, *plan.mtp_tensors]
    if not remove_exact_matches(set(actual), patterns):
        check_same_names(where, "tensors of the quantized checkpoint", actual, expand_all(patterns))


def swapped_modules(plan: BuildPlan) -> list[str]:
    return [module for pattern in plan.swap for module in expand(pattern)]


def drafter_weights(plan: BuildPlan) -> list[str]:
    """Return the 16-bit MTP weights that become INT4."""
    return [module + WEIGHT for pattern in plan.drafter_int4 for module in expand(pattern)]
