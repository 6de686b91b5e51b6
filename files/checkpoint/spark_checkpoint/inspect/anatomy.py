"""What a set of tensors is: groups, dtypes, duplicates, MTP, which recipe it fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_checkpoint.build.layouts import OVERLAY_SHARD
from spark_checkpoint.format.header import Header, Tensor
from spark_checkpoint.format.tree import natural_order
from spark_checkpoint.verify.gates import MTP_PREFIX, SCALE

_LAYER = re.compile(r"^model\.language_model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# The first that is found in a name; `re` keeps a pattern that it compiled.
_GROUPS = {
    "MTP experts": r"^mtp\..*\.experts\.",
    "MTP other": r"^mtp\.",
    "routed experts": r"\.mlp\.experts\.",
    "shared experts": r"\.mlp\.shared_expert\.",
    "routers and gates": r"\.mlp\.(gate|shared_expert_gate)\.",
    "linear attention": r"\.linear_attn\.",
    "attention": r"^model\.language_model\..*\.self_attn\.",
    "norms": r"^model\.language_model\..*norm\.",
    "embeddings": r"\.embed_tokens\.",
    "head": r"^lm_head\.",
    "vision": r"^model\.visual\.",
}


@dataclass(slots=True)
class Cell:
    """Tensors of one group and one dtype."""

    tensors: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class Anatomy:
    """Everything headers and index say about a tree or repository."""

    shards: int = 0
    stored_bytes: int = 0
    unique_bytes: int = 0
    names: dict[str, Tensor] = field(default_factory=dict)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    duplicates: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unindexed: tuple[str, ...] = ()
    unknown_to_shards: tuple[str, ...] = ()
    layers: int = 0
    linear_layers: int = 0
    experts: int = 0
    hidden: int = 0

    @property
    def mtp(self) -> int:
        """Number of MTP names."""
        return sum(name.startswith(MTP_PREFIX) for name in self.names)


def group_of(name: str) -> str:
    """Return the part of the model a tensor belongs to."""
    return next((group for group, part in _GROUPS.items() if re.search(part, name)), "other")


def examine(shards: Mapping[str, Header], index: Mapping[str, str] | None) -> Anatomy:
    """Describe headers as they are; contradictions are reported, not refused."""
    found = Anatomy(shards=len(shards))
    holders: dict[str, list[str]] = {}
    for shard in sorted(shards, key=natural_order):
        for name, tensor in shards[shard].tensors.items():
            holders.setdefault(name, []).append(shard)
            found.names[name] = tensor
            found.stored_bytes += tensor.size_bytes
    for name, tensor in found.names.items():
        cell = found.cells.setdefault((group_of(name), tensor.dtype), Cell())
        cell.tensors += 1
        cell.size_bytes += tensor.size_bytes
        found.unique_bytes += tensor.size_bytes
    found.duplicates = {n: tuple(files) for n, files in holders.items() if len(files) > 1}
    if index is not None:
        # An overlay leaves the names it replaces out of the index on purpose.
        replaced = {plain_name(name) for name in index if name != plain_name(name)}
        replaced |= {"lm_head.weight"} if "lm_head.qweight" in replaced else set()
        found.unindexed = tuple(sorted(holders.keys() - index.keys() - replaced))
        found.unknown_to_shards = tuple(
            sorted(name for name, shard in index.items() if shard not in holders.get(name, ()))
        )
    _measure(found)
    return found


def plain_name(name: str) -> str:
    """Return the name a tensor of an overlay stands for."""
    return name.removesuffix("_fp8").removesuffix("_int8")


def recipe_of(found: Anatomy, quant_method: str | None, shard_names: frozenset[str]) -> str:
    """Say in words what kind of tree this is."""
    shared = _dtypes(found, "shared experts")
    experts = _dtypes(found, "routed experts")
    if OVERLAY_SHARD in shard_names:
        kind = "hybrid, overlay layout (needs the plugin)"
    elif "I32" in experts and "F8_E4M3" in shared:
        kind = "hybrid, full layout (needs the plugin)"
    elif "I32" in experts and "I32" in shared:
        kind = "INT4 with INT8 shared experts (plain auto-round, no plugin)"
    elif "I32" in experts:
        kind = "INT4 base"
    elif "F8_E4M3" in experts:
        kind = "FP8 donor"
    elif experts:
        kind = f"{'/'.join(sorted(experts))} original"
    else:
        kind = "unknown"
    return f"{kind}, quant_method {quant_method}" if quant_method else kind


def scales_missing(found: Anatomy) -> list[str]:
    """Return FP8 weights whose block scales are not there: they would load as garbage."""
    missing = []
    for name, tensor in found.names.items():
        if tensor.dtype != "F8_E4M3":
            continue
        scale = name.replace(".weight_fp8", f"{SCALE}_fp8")
        scale = scale if scale != name else name.removesuffix(".weight") + SCALE
        if scale not in found.names:
            missing.append(name)
    return sorted(missing)


def _measure(found: Anatomy) -> None:
    layers, linear, experts = set(), set(), set()
    for name in found.names:
        match = _LAYER.match(name)
        if not match:
            continue
        layers.add(match[1])
        if ".linear_attn." in name:
            linear.add(match[1])
        expert = _EXPERT.search(name)
        if expert:
            experts.add(expert[1])
    norm = found.names.get("model.language_model.norm.weight")
    found.layers, found.linear_layers, found.experts = len(layers), len(linear), len(experts)
    found.hidden = norm.shape[0] if norm is not None and norm.shape else 0


def _dtypes(found: Anatomy, group: str) -> set[str]:
    return {dtype for name, dtype in found.cells if name == group}
