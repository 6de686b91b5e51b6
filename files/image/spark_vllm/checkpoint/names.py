"""Names of tensors and modules, without vLLM or torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

FP8_WEIGHT = "weight_fp8"
"""Overlay name of a block-FP8 weight; loaded as ``weight``."""

FP8_SCALE = "weight_scale_inv_fp8"
"""Overlay name of FP8 block scales; loaded as ``weight_scale_inv``."""

HEAD = "lm_head"
HEAD_PARTS = ("qweight", "scales", "qzeros")
HEAD_SUFFIX = "_int8"

TEXT_LAYERS = "model.language_model.layers."

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Fused modules of Qwen3.5 in vLLM 0.30 to 0.33; the self-check compares them with the engine's."""


def fused_shards(module: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the shards of a fused engine module, or the module itself if it is not fused."""
    parent, _, last = module.rpartition(".")
    if last not in packed:
        return [module]
    prefix = f"{parent}." if parent else ""
    return [prefix + shard for shard in packed[last]]


def are_all_shards_listed(
    module: str, listed: Collection[str], packed: Mapping[str, Sequence[str]]
) -> bool:
    """Return whether every shard of ``module`` is in ``listed``.

    Raise ValueError if only some shards of a fused module are listed.
    """
    shards = fused_shards(module, packed)
    missing = [shard for shard in shards if shard not in listed]
    if not missing:
        return True
    if len(missing) == len(shards):
        return False
    present = [shard for shard in shards if shard in listed]
    raise ValueError(
        "config.json: quantization_config.fp8_block.modules: "
        f"lists {', '.join(present)}, but not all shards of {module} ({', '.join(shards)}), "
        "which need the same format; fix: build the checkpoint again"
    )


def fused_modules(modules: Collection[str]) -> set[str]:
    """Return the engine's names of the modules; raise ValueError if a shard is missing."""
    fused_names = {shard: fused for fused, shards in FUSED.items() for shard in shards}
    result = set()
    for module in modules:
        parent, _, last = module.rpartition(".")
        result.add(f"{parent}.{fused_names[last]}" if last in fused_names else module)
    for name in result:
        are_all_shards_listed(name, modules, FUSED)
    return result


def overlay_rules(
    fp8_modules: Sequence[str], head_int8: bool
) -> list[tuple[re.Pattern[str], str | None]]:
    r"""Return the ordered rename rules from overlay names to plain names.

    A rule is (pattern, replacement); ``None`` drops the tensor. The 16-bit weight is dropped
    *before* the FP8 weight takes that name. Patterns match only full checkpoint names, because vLLM
    applies the rules again to shorter names in nested loaders, where renamed tensors must survive.
    """
    rules: list[tuple[re.Pattern[str], str | None]] = []
    if fp8_modules:
        modules = _modules_pattern(fp8_modules)
        rules.append((re.compile(rf"^{modules}\.weight$"), None))
        rules.append((re.compile(rf"^({modules})\.{FP8_WEIGHT}$"), r"\1.weight"))
        rules.append((re.compile(rf"^({modules})\.{FP8_SCALE}$"), r"\1.weight_scale_inv"))
    if head_int8:
        parts = "|".join(HEAD_PARTS)
        rules.append((re.compile(rf"^{HEAD}\.weight$"), None))
        rules.append((re.compile(rf"^{HEAD}\.({parts}){HEAD_SUFFIX}$"), rf"{HEAD}.\1"))
    return rules


def rename(name: str, rules: Iterable[tuple[re.Pattern[str], str | None]]) -> str | None:
    """Apply ``rules`` like vLLM's weight mapper; return None for a dropped tensor."""
    for pattern, replacement in rules:
        if pattern.search(name):
            if replacement is None:
                return None
            name = pattern.sub(replacement, name)
    return name


def _modules_pattern(modules: Sequence[str]) -> str:
    """Return a regular expression for ``modules``, kept short because it runs on 113,000 names."""
    inners_by_layer: dict[str, list[str]] = {}
    for module in modules:
        layer, _, inner = module.removeprefix(TEXT_LAYERS).partition(".")
        if not module.startswith(TEXT_LAYERS) or not layer.isdigit() or not inner:
            raise ValueError(
                "config.json: quantization_config.fp8_block.modules: "
                f"an overlay requires modules below {TEXT_LAYERS}N, got {module!r}; "
                "fix: build with layout 'full'"
            )
        inners_by_layer.setdefault(layer, []).append(inner)
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer, inners in inners_by_layer.items():
        groups.setdefault(tuple(sorted(inners)), []).append(layer)
    alternatives = (
        rf"(?:{'|'.join(layers)})\.(?:{'|'.join(map(re.escape, inners))})"
        for inners, layers in groups.items()
    )
    return re.escape(TEXT_LAYERS) + f"(?:{'|'.join(alternatives)})"


def check_expert_width(module: str, width: int, group_size: int) -> None:
    """Reject packed experts that are not wider than a scale group on this device.

    vLLM 0.30 to 0.33 reorders the scales of gate and up by the experts' width instead of the inputs
    (``fused_moe/oracle/int_wna16.py``, ``size_k`` of ``w13``), which is wrong for a single group.
    """
    if width <= group_size:
        raise ValueError(
            f"{module}: experts are {width} wide on this device, "
            f"and scale groups are {group_size} wide; "
            "the engine would misorder the scales of gate and up, and return wrong answers; "
            f"fix: lower --tensor-parallel-size until experts are wider than {group_size}"
        )
