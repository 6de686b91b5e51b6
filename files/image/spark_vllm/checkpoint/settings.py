"""Read and check the formats in a checkpoint's ``config.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_vllm import QUANT_METHOD
from spark_vllm.checkpoint import names

BLOCK_SHAPE = (128, 128)
"""The only block shape of FP8 sources and of vLLM's block kernels."""


@dataclass(frozen=True)
class Settings:
    """Formats of a hybrid checkpoint, as plain data, because vLLM pickles it."""

    fp8_modules: tuple[str, ...]  # checkpoint names
    block_shape: tuple[int, int]
    overlay: bool  # 16-bit weights and their replacements are both in the files
    head_int8: bool
    bits: int
    group_size: int
    block_names: tuple[str, ...]  # modules below these are quantized, unless extra lists them
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def rules(self) -> list[Any]:
        """Renames from the checkpoint's tensor names to plain names; empty for layout 'full'."""
        return names.overlay_rules(self.fp8_modules, self.head_int8) if self.overlay else []


def read_settings(config: Mapping[str, Any]) -> Settings:
    _require(config.get("quant_method") == QUANT_METHOD, "quant_method", config, QUANT_METHOD)
    _require(
        config.get("sym", True) is True, "sym", config, "true, because zero points are not read"
    )
    _require(config.get("data_type", "int") == "int", "data_type", config, "int")
    packing = config.get("packing_format", "auto_round:auto_gptq")
    _require("gptq" in packing, "packing_format", config, "auto_round:auto_gptq")
    bits, group_size = config.get("bits"), config.get("group_size")
    _require(bits in (4, 8), "bits", config, "4 or 8")
    _require(isinstance(group_size, int) and group_size > 0, "group_size", config, "128")
    block = config.get("fp8_block")
    _require(isinstance(block, Mapping), "fp8_block", config, "{modules, block_shape}")
    spark = config.get("spark", {})
    layout, head = spark.get("layout", "full"), spark.get("head", "keep")
    _require(layout in ("overlay", "full"), "spark.layout", spark, "overlay or full")
    _require(head in ("keep", "int8-g128"), "spark.head", spark, "keep or int8-g128")
    shape = tuple(block.get("block_shape", ()))  # type: ignore[union-attr] # checked above
    _require(shape == BLOCK_SHAPE, "fp8_block.block_shape", config, list(BLOCK_SHAPE))
    modules = tuple(block.get("modules", ()))  # type: ignore[union-attr] # checked above
    _require(modules == tuple(dict.fromkeys(modules)), "fp8_block.modules", config, "unique names")
    names.fused_modules(modules)
    extra = dict(config.get("extra_config") or {})
    _check_extra(extra, int(group_size or 0))
    settings = Settings(
        fp8_modules=modules,
        block_shape=BLOCK_SHAPE,
        overlay=layout == "overlay",
        head_int8=head != "keep",
        bits=int(bits or 0),
        group_size=int(group_size or 0),
        block_names=_read_block_names(config),
        extra=extra,
    )
    if settings.overlay:
        names.overlay_rules(modules, settings.head_int8)
    return settings


def _check_extra(extra: Mapping[str, Any], group_size: int) -> None:
    """Reject modules whose format differs from the global one in more than the bit width."""
    packed = {"group_size": group_size, "sym": True, "data_type": "int"}
    for name, entry in extra.items():
        module = entry if isinstance(entry, Mapping) else {"bits": entry}
        bits = module.get("bits", 4)
        differs = [key for key, value in packed.items() if module.get(key, value) != value]
        if bits not in (4, 8, 16, 32) or (bits < 16 and differs):
            accepted = (
                f"16 bits, or 4 or 8 bits with group_size {group_size}, sym true and data_type int"
            )
        elif not _is_pattern(name):
            accepted = "a name or a regular expression as key"
        else:
            continue
        raise ValueError(
            f"config.json: quantization_config.extra_config.{name}: {dict(module)}, "
            f"expected {accepted}; fix: use a base checkpoint with these values"
        )


def _is_pattern(name: str) -> bool:
    try:
        re.compile(name)
    except re.error:
        return False
    return True


def _read_block_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``block_name_to_quantize``, without which INC would also quantize MTP layers."""
    value = config.get("block_name_to_quantize", config.get("to_quant_block_names"))
    _require(
        bool(value), "block_name_to_quantize", config, "the text layers, e.g. " + names.TEXT_LAYERS
    )
    return tuple(value.split(",") if isinstance(value, str) else value or ())


def _require(is_valid: bool, key: str, config: Mapping[str, Any], accepted: object) -> None:
    if not is_valid:
        text = repr(config.get(key.rpartition(".")[2], "missing"))
        text = text if len(text) < 80 else text[:77] + "..."
        raise ValueError(
            f"config.json: quantization_config.{key}: {text}, expected {accepted}; "
            "fix: build the checkpoint again with the installed version of dgx-spark-deploy"
        )
