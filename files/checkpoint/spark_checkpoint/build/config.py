"""Derives the result's config.json from the base's and from the tensors really there."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from spark_contract.orders import RECIPE_VERSION, BuildPlan

from spark_checkpoint.errors import GateRefused

PLUGIN_METHOD = "spark_inc"
_LANGUAGE_BLOCKS = "model.language_model.layers"
_MTP_BLOCKS = "mtp.layers"
_INT8 = {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}
_PLAIN = {"bits": 16, "data_type": "float"}


def check_config(base: Mapping[str, Any], where: str, head: str) -> None:
    quantization = base.get("quantization_config")
    if not isinstance(quantization, dict):
        raise GateRefused(where, "has no quantization_config: not an INT4 base", "check the base")
    # An exporter may write null for "nothing".
    per_module = quantization.get("extra_config")
    if per_module is not None and not isinstance(per_module, dict):
        raise GateRefused(
            where,
            f"has a {type(per_module).__name__} as quantization_config.extra_config, "
            "expected an object of modules",
            "use another commit of the base, or correct its config",
        )
    if head == "int8-g128" and any(level.get("tie_word_embeddings") for level in _levels(base)):
        raise GateRefused(
            where,
            "ties the head to the embeddings, so the head cannot be packed alone",
            "plan head: keep",
        )


def result_config(
    base: Mapping[str, Any], plan: BuildPlan, names: Collection[str], modules: Sequence[str]
) -> dict[str, Any]:
    """Return config.json of a result whose tensors are ``names``; ``base`` passed `usable`.

    The method is renamed only where an engine without the plugin would read the tree wrongly;
    a tree of INT4, INT8 and 16-bit weights in full layout stays plain ``auto-round``.
    """
    config = copy.deepcopy(dict(base))
    quantization = config["quantization_config"]
    fp8 = plan.shared_experts.startswith("fp8")
    replaced = fp8 or plan.shared_experts == "int8-g128" or plan.head != "keep"
    if fp8 or (plan.layout == "overlay" and replaced):
        quantization["quant_method"] = PLUGIN_METHOD
    if fp8:
        quantization["fp8_block"] = {
            "modules": list(modules),
            "block_shape": list(plan.block_shape),
        }
    per_module = quantization["extra_config"] = quantization.get("extra_config") or {}
    if plan.shared_experts == "int8-g128":
        per_module.update({module: dict(_INT8) for module in modules})
    if plan.head == "int8-g128":
        # The engine's default is true where the key is missing.
        for level in _levels(config):
            level["tie_word_embeddings"] = False
        per_module["lm_head"] = dict(_INT8)
    set_blocks(quantization, names)
    quantization["spark"] = {
        "layout": plan.layout,
        "recipe_version": RECIPE_VERSION,
        "head": plan.head,
    }
    return merged(config, plan.extra)


def merged(config: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``extra`` into ``config``, mapping by mapping; anything else replaces."""
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), dict):
            merged(config[key], value)
        else:
            config[key] = copy.deepcopy(value)
    return config


def set_blocks(quantization: dict[str, Any], names: Collection[str]) -> None:
    """Name the blocks that hold packed weights, as the tensors say, not as the base claims.

    Without the list the engine takes every linear for quantised, MTP included; with MTP listed
    although its tensors are 16-bit (or the other way round) it refuses or misreads them.
    """
    blocks = [
        block
        for block in (_LANGUAGE_BLOCKS, _MTP_BLOCKS)
        if any(name.startswith(f"{block}.") and name.endswith(".qweight") for name in names)
    ]
    as_text = not isinstance(quantization.get("block_name_to_quantize"), list)
    quantization["block_name_to_quantize"] = ",".join(blocks) if as_text else blocks
    if _MTP_BLOCKS not in blocks:
        return
    per_module = quantization["extra_config"] = quantization.get("extra_config") or {}
    drafter = sorted(name for name in names if name.startswith(f"{_MTP_BLOCKS}."))
    packed = {name.removesuffix(".qweight") for name in drafter if name.endswith(".qweight")}
    for name in drafter:
        module = name.removesuffix(".weight")
        if module != name and module not in packed and not module.endswith("norm"):
            per_module.setdefault(module, dict(_PLAIN))


def _levels(config: Mapping[str, Any]) -> list[Any]:
    return [level for level in (config, config.get("text_config")) if isinstance(level, dict)]
