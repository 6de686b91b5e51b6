"""Compute the memory of weights, drafter, runtime and KV cache.

The weights of hybrid models follow from the architecture, because files can repeat or lack
tensors. INT4 in groups of 128: half a byte, a 16-bit scale and a 4-bit zero per group.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from spark_deploy.config.catalog.architecture import Architecture
from spark_deploy.config.catalog.model import HybridModel, Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.documents import GIB
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.kv_cache import (
    TURBOQUANT,
    cache_shape,
    context_tokens,
    measured_cache,
    mtp_drafts,
    relative_cache_size,
)
from spark_deploy.plan.types import MemoryPlan

# The engine checks against the total of the GPU driver, about 2 % above MemTotal.
START_MARGIN = 1.02
# All LoRA slots have the rank of the widest adapter, rounded up to these ranks.
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
INT4_BYTES = 0.5 + 2 / 128 + 0.5 / 128
_INT8 = 1 + 2 / 128 + 1 / 128
_BF16_BYTES = 2.0
_FP8 = 1 + 2 / 128**2
_NGRAM_BLOCK_BYTES = 4096
NGRAM_CACHE_BYTES = 1 << 30
"""Memory in which the plugin caches rows of an n-gram table file."""
# NVFP4: an 8-bit scale per group of 16.
SCHEME_BYTES = {"int4": INT4_BYTES, "nvfp4": 0.5 + 1 / 16, "bf16": _BF16_BYTES, "fp8": 1.0}


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of each part, as stored in the base checkpoint and as replaced by a profile."""

    experts_bytes: int
    attention_bytes: int  # full attention and GDN projections
    attention_fp8_bytes: int
    hyper_bytes: int
    ngram_bytes: int
    embedding_bytes: int
    head_bytes: int
    head_int8_bytes: int
    shared_bytes: int
    shared_fp8_bytes: int
    shared_int8_bytes: int
    routers_bytes: int
    vision_bytes: int
    mtp_bytes: int

    @property
    def tree_bytes(self) -> int:
        """Unique tensors of the base checkpoint, MTP and vision included."""
        language = self.experts_bytes + self.attention_bytes + self.shared_bytes
        language += self.embedding_bytes + self.head_bytes + self.routers_bytes
        language += self.hyper_bytes + self.ngram_bytes
        return language + self.vision_bytes + self.mtp_bytes


def weight_sizes(model: Architecture) -> Weights:
    expert = 3 * model.hidden * model.expert_width
    shared = model.layers * 3 * model.hidden * model.shared_expert_width
    matrix = model.vocabulary * model.hidden
    attention = model.attention_layers * _attention_parameters(model)
    attention += model.linear_layers * _delta_net_parameters(model)
    mtp, table = mtp_layer_bytes(model), model.ngram_table
    return Weights(
        experts_bytes=round(
            model.layers * model.experts * expert * SCHEME_BYTES[model.experts_scheme]
        ),
        attention_bytes=round(attention * SCHEME_BYTES[model.attention_scheme]),
        attention_fp8_bytes=round(attention * _FP8),
        hyper_bytes=round(model.layers * 2 * _mixer_parameters(model) * _BF16_BYTES),
        ngram_bytes=round(table.rows * table.width * SCHEME_BYTES[table.format]) if table else 0,
        embedding_bytes=round(matrix * _BF16_BYTES),
        head_bytes=round(matrix * _BF16_BYTES),
        head_int8_bytes=round(matrix * _INT8),
        shared_bytes=round(shared * _BF16_BYTES),
        shared_fp8_bytes=round(shared * _FP8),
        shared_int8_bytes=round(shared * _INT8),
        routers_bytes=round(model.layers * model.experts * model.hidden * _BF16_BYTES),
        vision_bytes=model.vision_bytes,
        mtp_bytes=round(
            model.mtp_layers * (mtp.plain + mtp.attention + model.experts * mtp.expert)
        ),
    )


def _attention_parameters(model: Architecture) -> int:
    """Return the parameter count of a full-attention layer. Its gate doubles the queries."""
    queries = 2 * model.attention_heads * model.head_width
    keys_values = 2 * model.kv_heads * model.head_width
    indexer = model.sparse_attention
    index = (indexer.index_heads + 1) * indexer.index_width if indexer else 0
    outputs = model.attention_heads * model.head_width
    return model.hidden * (queries + keys_values + outputs + index)


def _mixer_parameters(model: Architecture) -> int:
    """Return the parameter count of a mixer: down and up projections, and output weights."""
    mixer = model.hyper_connections
    return model.hidden * mixer.streams * (2 * mixer.rank + mixer.streams) if mixer else 0


def ngram_file_bytes(model: Architecture, profile: Profile) -> int:
    """Return the size of the built n-gram table in bytes. Blocks contain whole rows only."""
    table, scheme = model.ngram_table, profile.ngram_format
    if table is None or scheme == "keep":
        return 0
    bytes_per_16_values = {"e2m1": 8 + 1, "e4m3": 16}[scheme]  # e2m1: 4-bit values, 1-byte scale
    row_bytes = table.width * bytes_per_16_values // 16
    return math.ceil(table.rows / (_NGRAM_BLOCK_BYTES // row_bytes)) * _NGRAM_BLOCK_BYTES


def _delta_net_parameters(model: Architecture) -> int:
    """Return the parameter count of a gated delta net: q, k, v, z, a, b and output projections."""
    net = model.linear_attention
    if net is None:
        return 0
    keys, values = net.key_heads * net.head_width, net.value_heads * net.head_width
    return model.hidden * (2 * keys + values + values + 2 * net.value_heads + values)


class MtpLayer(NamedTuple):
    """Bytes of an MTP layer; the plain part stays in 16 bits."""

    plain: float
    attention: float
    expert: float  # per expert


def mtp_layer_bytes(model: Architecture) -> MtpLayer:
    bytes_per_parameter = INT4_BYTES if model.mtp_scheme == "int4" else _BF16_BYTES
    dense = 3 * model.hidden * model.shared_expert_width + model.experts * model.hidden
    projection = 2 * model.hidden * model.hidden + 3 * _mixer_parameters(model)
    return MtpLayer(
        plain=(dense + projection) * _BF16_BYTES,
        attention=_attention_parameters(model) * bytes_per_parameter,
        expert=3 * model.hidden * model.expert_width * bytes_per_parameter,
    )


def served_architecture(model: Architecture, profile: Profile) -> Architecture:
    """Return the architecture with the drafter's weights as this profile serves them."""
    return replace(model, mtp_scheme="int4") if profile.drafter == "int4-g128" else model


def plan_memory(model: Model, profile: Profile, settings: Settings) -> MemoryPlan:
    """Return the memory plan for a model that fits (``missing_bytes`` is zero or less)."""
    memory = settings.memory
    weights, drafter = loaded_bytes(model, profile, settings.ranks)
    runtime = runtime_bytes(model, profile)
    fixed = weights + drafter + runtime
    budget = _budget_bytes(profile, settings, fixed)
    cache_bytes = budget - fixed
    shape = cache_shape(model, profile, settings.ranks)
    context = context_tokens(model, profile)
    blocks = cache_bytes // shape.block_bytes if shape else 0
    sequences = profile.limits.max_sequences
    measured = measured_cache(model, profile)
    return MemoryPlan(
        total_bytes=memory.total_bytes,
        reserve_bytes=settings.reserved_bytes,
        weights_bytes=weights,
        drafter_bytes=drafter,
        vision_bytes=vision_bytes(model, profile),
        graphs_bytes=runtime,
        kv_cache_bytes=cache_bytes,
        block_tokens=shape.block_tokens if shape else 0,
        kv_tokens=shape.capacity_tokens(cache_bytes, sequences, context) if shape else None,
        full_context_users=round(blocks / shape.request_blocks(context), 2) if shape else None,
        needed_bytes=round(budget * START_MARGIN),
        floor_bytes=memory.floor_bytes,
        # Rounded up if the cache size is fixed, because the engine rejects a smaller budget.
        memory_fraction=math.ceil(round(budget / memory.total_bytes * 100, 6)) / 100,
        unknown=tuple(_unknown_sizes(model, profile)),
        measured_by=f"{measured.by}, with contexts of up to {measured.context_tokens:,} tokens"
        if measured
        else "",
    )


def _unknown_sizes(model: Model, profile: Profile) -> Iterator[str]:
    """Yield each size that cannot be computed, with the reason."""
    drafts = profile.speculation
    if not isinstance(model, PlainModel):
        if drafts and drafts.repository:
            yield "KV cache of the drafter: cannot be computed for models with recurrent layers"
        return
    metadata = model.metadata
    drafter = drafts.metadata if drafts else None
    if metadata is None or not metadata.weights:
        fix = "run `spark-deploy update` to read the repository's headers"
        yield f"weights, context and KV cache: {fix}"
        return
    if metadata.cache_unknown and measured_cache(model, profile) is None:
        yield f"KV cache per token: {metadata.cache_unknown}"
    elif drafter is not None and drafter.cache_unknown:
        yield f"KV cache of the drafter per token: {drafter.cache_unknown}"
    elif relative_cache_size(profile.kv_cache.dtype) is None and metadata.cache:
        yield f"KV cache per token: cannot be computed for {profile.kv_cache.dtype}"
    if metadata.context_tokens is None:
        yield "maximum context length: missing from config.json; set engine.max_context_tokens"


def missing_bytes(model: Model, profile: Profile, settings: Settings) -> int:
    """Return the bytes missing for a full-length request; zero or less if it fits."""
    fixed = sum(loaded_bytes(model, profile, settings.ranks)) + runtime_bytes(model, profile)
    budget = _budget_bytes(profile, settings, fixed)
    shape = cache_shape(model, profile, settings.ranks)
    # If the cache size is unknown, the engine reports at startup whether a request fits.
    blocks = shape.request_blocks(context_tokens(model, profile)) if shape else 0
    request_bytes = blocks * shape.block_bytes if shape else 0
    available = settings.memory.total_bytes - settings.reserved_bytes
    return max(fixed + request_bytes - budget, budget - available)


def _budget_bytes(profile: Profile, settings: Settings, fixed_bytes: int) -> int:
    """Return the engine's memory limit: what a fixed cache size needs, or the allowed fraction."""
    memory = settings.memory
    if profile.kv_cache.size_bytes:
        return fixed_bytes + profile.kv_cache.size_bytes
    available = memory.total_bytes - settings.reserved_bytes
    fraction = min(
        profile.limits.memory_fraction, math.floor(available / memory.total_bytes * 100) / 100
    )
    return round(fraction * memory.total_bytes)


def loaded_bytes(model: Model, profile: Profile, ranks: int = 1) -> tuple[int, int]:
    """Return the bytes of weights and of the drafter that each rank loads.

    Routers, hyper-connections, vision tower, adapters and separate drafters are not split.
    """
    body, mtp = _model_bytes(model, profile, ranks)
    drafter = profile.speculation.metadata if profile.speculation else None
    return body + _adapters_bytes(model), mtp + (drafter.weights_bytes if drafter else 0)


def _model_bytes(model: Model, profile: Profile, ranks: int) -> tuple[int, int]:
    """Return the bytes of the model and of its MTP layers on each rank."""
    factor, vision = model.memory.weights_factor, vision_bytes(model, profile)
    if isinstance(model, PlainModel):
        if model.metadata is None:
            return 0, 0
        mtp = model.metadata.drafter_bytes if mtp_drafts(profile) else 0
        return round(model.metadata.weights_bytes * factor) + vision, round(mtp * factor)
    sizes = weight_sizes(served_architecture(model.architecture, profile))
    shared = {"keep": sizes.shared_bytes, "int8-g128": sizes.shared_int8_bytes}.get(
        profile.shared_experts, sizes.shared_fp8_bytes
    )
    body = sizes.experts_bytes + attention_bytes(model.architecture, profile)
    from_file = profile.ngram_table == "file"
    body += sizes.embedding_bytes + (NGRAM_CACHE_BYTES if from_file else sizes.ngram_bytes)
    body += shared + (sizes.head_bytes if profile.head == "keep" else sizes.head_int8_bytes)
    body = math.ceil(body / ranks) + sizes.routers_bytes + sizes.hyper_bytes
    mtp = math.ceil(sizes.mtp_bytes / ranks) if mtp_drafts(profile) else 0
    if share := draft_vocabulary_share(model.architecture, profile):
        mtp += round(share * sizes.head_int8_bytes)
    return round(body * factor) + vision, round(mtp * factor)


def draft_vocabulary_share(model: Architecture, profile: Profile) -> float | None:
    """Return the share of LM head rows that the drafter copies; ``None`` if it has no copy."""
    drafts = profile.speculation
    count = drafts.draft_vocabulary_tokens if drafts else None
    return min(1.0, count / model.vocabulary) if count else None


def attention_bytes(model: Architecture, profile: Profile) -> int:
    """Return the size of the attention projections; FP8 profiles also convert 16-bit ones."""
    sizes = weight_sizes(model)
    swapped = model.attention_scheme == "bf16" and profile.shared_experts.startswith("fp8")
    return sizes.attention_fp8_bytes if swapped else sizes.attention_bytes


def vision_bytes(model: Model, profile: Profile) -> int:
    if isinstance(model, PlainModel):
        # The engine can omit the vision tower, but omits the audio tower with it.
        loads_towers = profile.vision or not model.vision or model.audio
        return model.metadata.vision_bytes if model.metadata and loads_towers else 0
    return model.architecture.vision_bytes if profile.vision else 0


def runtime_bytes(model: Model, profile: Profile) -> int:
    """Return the memory that the engine needs in addition to weights and cache.

    TurboQuant unpacks the cache into two 16-bit buffers for the maximum context during prefill.
    """
    buffers_bytes = 0
    if profile.kv_cache.dtype in TURBOQUANT and isinstance(model, HybridModel):
        shape = model.architecture
        buffers_bytes = 4 * shape.kv_heads * shape.head_width * context_tokens(model, profile)
    return model.memory.runtime_bytes + buffers_bytes


def adapter_rank(model: Model) -> int:
    """Return the rank of the LoRA slots; 0 without adapters."""
    widest = max((adapter.rank for adapter in model.adapters.values()), default=0)
    return next((rank for rank in _ADAPTER_RANKS if rank >= widest), widest) if widest else 0


def _adapters_bytes(model: Model) -> int:
    rank = adapter_rank(model)
    sizes = [
        adapter.metadata.weights_bytes * rank // adapter.rank
        for adapter in model.adapters.values()
        if adapter.metadata
    ]
    return len(model.adapters) * max(sizes, default=0)


def gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
