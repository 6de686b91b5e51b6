"""What a set of tensors is: groups, dtypes, duplicates, MTP, which recipe it fits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from spark_checkpoint.build.layouts import OVERLAY_SHARD
from spark_checkpoint.format.directory import natural_order
from spark_checkpoint.format.headers import Header, Tensor
from spark_checkpoint.tensor_sets import MTP_PREFIX, SCALE

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


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Everything headers and index say about a tree or repository."""

    names: dict[str, Tensor]  # of several copies the one that counts
    stored_bytes: int  # of all copies
    tensors: Counter[tuple[str, str]]  # by group and dtype
    sizes_bytes: Counter[tuple[str, str]]
    duplicates: list[str]
    unindexed: list[str]
    unknown_to_shards: list[str]
    layers: int
    linear_layers: int
    experts: int

    @property
    def hidden(self) -> int:
        """The hidden size, as the last norm tells it."""
        norm = self.names.get("model.language_model.norm.weight")
        return norm.shape[0] if norm is not None and norm.shape else 0

    @property
    def mtp(self) -> int:
        return sum(name.startswith(MTP_PREFIX) for name in self.names)


def group_of(name: str) -> str:
    return next((group for group, part in _GROUPS.items() if re.search(part, name)), "other")


def examine(shards: Mapping[str, Header], index: Mapping[str, str] | None) -> Anatomy:
    """Describe headers as they are; contradictions are reported, not refused."""
    holders: dict[str, list[str]] = {}
    for shard in sorted(shards, key=natural_order):
        for name in shards[shard].tensors:
            holders.setdefault(name, []).append(shard)
    names = {name: shards[files[-1]].tensors[name] for name, files in holders.items()}
    tensors: Counter[tuple[str, str]] = Counter()
    sizes_bytes: Counter[tuple[str, str]] = Counter()
    for name, tensor in names.items():
        tensors[group_of(name), tensor.dtype] += 1
        sizes_bytes[group_of(name), tensor.dtype] += tensor.size_bytes
    if index is None:
        index = {name: files[-1] for name, files in holders.items()}
    # An overlay leaves the names it replaces out of the index on purpose.
    replaced = {plain_name(name) for name in index if name != plain_name(name)}
    replaced |= {"lm_head.weight"} if "lm_head.qweight" in replaced else set()
    layers = [(match[1], name) for name in names if (match := _LAYER.match(name))]
    return Anatomy(
        names=names,
        stored_bytes=sum(
            t.size_bytes for header in shards.values() for t in header.tensors.values()
        ),
        tensors=tensors,
        sizes_bytes=sizes_bytes,
        duplicates=[name for name, files in holders.items() if len(files) > 1],
        unindexed=sorted(holders.keys() - index.keys() - replaced),
        unknown_to_shards=sorted(
            n for n, shard in index.items() if shard not in holders.get(n, ())
        ),
        layers=len({layer for layer, _ in layers}),
        linear_layers=len({layer for layer, name in layers if ".linear_attn." in name}),
        experts=len({expert[1] for _, name in layers if (expert := _EXPERT.search(name))}),
    )


def plain_name(name: str) -> str:
    return name.removesuffix("_fp8").removesuffix("_int8")


def recipe_of(found: Anatomy, quant_method: str | None, shard_names: frozenset[str]) -> str:
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


def _dtypes(found: Anatomy, group: str) -> set[str]:
    return {dtype for name, dtype in found.tensors if name == group}
