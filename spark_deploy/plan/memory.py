"""How one host's memory is spent, and what to change when it does not suffice.

Block arithmetic of the engine's hybrid cache (checked against its published block sizes): one
attention page is raised until it holds one GDN state, layers are grouped into equal groups, and
a request takes pages for its context in the attention group and one state in each GDN group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from spark_deploy.config.catalog.model import Architecture, HybridModel, Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan import disk, plain_memory
from spark_deploy.plan.disk import CacheShape, group_layers
from spark_deploy.plan.engine_options import prefill_backend
from spark_deploy.plan.types import MemoryPlan
from spark_deploy.plan.weights import Weights, of_one_rank, weights_of

GIB = 1024**3
# The engine checks against the total of the GPU driver, about 2 % above MemTotal.
START_MARGIN = 1.02
# (key bits, value bits, bytes of scales) of one head and token.
_TURBOQUANT = {
    "turboquant_k8v4": (8, 4, 4),
    "turboquant_4bit_nc": (4, 4, 6),
    "turboquant_k3v4_nc": (3, 4, 6),
    "turboquant_3bit_nc": (3, 3, 6),
}


def plan_memory(model: Model, profile: Profile, settings: Settings) -> MemoryPlan:
    """Return the memory plan of a pair that fits (``missing_bytes`` is zero or less)."""
    memory = settings.memory
    weights, drafter = loaded_bytes(model, profile, settings.ranks)
    runtime = runtime_bytes(model, profile)
    fixed = weights + drafter + runtime
    budget = budget_bytes(profile, settings, fixed)
    cache_bytes = budget - fixed
    shape = shape_of(model, profile, settings.ranks)
    context = context_tokens(model, profile)
    sequences = profile.limits.max_sequences
    return MemoryPlan(
        total_bytes=memory.total_bytes,
        reserve_bytes=settings.kept_bytes,
        weights_bytes=weights,
        drafter_bytes=drafter,
        vision_bytes=vision_bytes(model, profile),
        graphs_bytes=runtime,
        kv_cache_bytes=cache_bytes,
        block_tokens=shape.block_tokens if shape else 0,
        kv_tokens=shape.held_tokens(cache_bytes, sequences, context) if shape else None,
        full_context_users=_requests(shape, cache_bytes, context) if shape else None,
        needed_bytes=round(budget * START_MARGIN),
        floor_bytes=memory.floor_bytes,
        # Rounded up when the cache is pinned: the engine refuses to start on a budget too small.
        memory_fraction=math.ceil(round(budget / memory.total_bytes * 100, 6)) / 100,
        unknown=tuple(_unknown(model, profile)),
        counted_by=_counted_by(model, profile),
    )


def _unknown(model: Model, profile: Profile) -> Iterator[str]:
    """Yield what of the memory cannot be computed, and why."""
    if isinstance(model, PlainModel):
        yield from plain_memory.unknown(model, profile)
    elif profile.speculation and profile.speculation.repository:
        yield "KV cache of the drafter: not worked out beside layers that keep a state"


def _counted_by(model: Model, profile: Profile) -> str:
    found = plain_memory.counted(model, profile) if isinstance(model, PlainModel) else None
    if found is None:
        return ""
    return f"{found.by}, with contexts of up to {found.context_tokens:,} tokens"


def _requests(shape: CacheShape, cache_bytes: int, context: int) -> float:
    return round(cache_bytes // shape.block_bytes / shape.request_blocks(context), 2)


def missing_bytes(model: Model, profile: Profile, settings: Settings) -> int:
    """Return what is missing for one request of full length; zero or less when it fits."""
    loaded = loaded_bytes(model, profile, settings.ranks)
    fixed = sum(loaded) + runtime_bytes(model, profile)
    budget = budget_bytes(profile, settings, fixed)
    shape = shape_of(model, profile, settings.ranks)
    # Of a cache that nobody knows, what is left is all there is; the engine says at its start
    # whether a request fits.
    request = (
        shape.request_blocks(context_tokens(model, profile)) * shape.block_bytes if shape else 0
    )
    room = settings.memory.total_bytes - settings.kept_bytes
    return max(fixed + request - budget, budget - room)


def budget_bytes(profile: Profile, settings: Settings, fixed_bytes: int) -> int:
    """Return what the engine may take in all: the fraction, but never the reserve."""
    memory = settings.memory
    if profile.kv_cache.size_bytes:
        return fixed_bytes + profile.kv_cache.size_bytes
    room = memory.total_bytes - settings.kept_bytes
    fraction = min(
        profile.limits.memory_fraction, math.floor(room / memory.total_bytes * 100) / 100
    )
    return round(fraction * memory.total_bytes)


def loaded_bytes(model: Model, profile: Profile, ranks: int = 1) -> tuple[int, int]:
    """Return the bytes that one of so many ranks loads: of the weights, and of the drafter.

    Routers, the vision tower, adapters and a drafter of another repository are whole on every rank.
    """
    body, drafter = _own_bytes(model, profile, ranks)
    return body + disk.adapters_bytes(model), drafter + disk.drafter_bytes(profile)


def _own_bytes(model: Model, profile: Profile, ranks: int) -> tuple[int, int]:
    """Return what is loaded of the model's own tree."""
    if isinstance(model, PlainModel):
        return plain_memory.loaded_bytes(model, profile)
    sizes: Weights = weights_of(model.architecture)
    shared = {
        "keep": sizes.shared_bytes,
        "fp8-donor": sizes.shared_fp8_bytes,
        "fp8-base": sizes.shared_fp8_bytes,
        "fp8-self": sizes.shared_fp8_bytes,
        "int8-g128": sizes.shared_int8_bytes,
    }[profile.shared_experts]
    body = sizes.experts_bytes + sizes.attention_bytes + sizes.embedding_bytes
    body += shared + (sizes.head_bytes if profile.head == "keep" else sizes.head_int8_bytes)
    body = math.ceil(body / ranks) + sizes.routers_bytes
    drafter = math.ceil(sizes.mtp_bytes / ranks) if own_drafts(profile) else 0
    factor = model.memory.weights_factor
    return round(body * factor) + vision_bytes(model, profile), round(drafter * factor)


def vision_bytes(model: Model, profile: Profile) -> int:
    """Return what the vision tower takes of the weights; it is never quantised."""
    if isinstance(model, PlainModel):
        return plain_memory.vision_bytes(model, profile)
    return model.architecture.vision_bytes if profile.vision else 0


def runtime_bytes(model: Model, profile: Profile) -> int:
    """Return what the engine needs beside weights and cache.

    A TurboQuant cache is unpacked into two 16-bit buffers of the longest context while prompts
    are computed.
    """
    work = 0
    if profile.kv_cache.dtype in _TURBOQUANT and isinstance(model, HybridModel):
        shape = model.architecture
        work = 4 * shape.kv_heads * shape.head_width * context_tokens(model, profile)
    return model.memory.runtime_bytes + work


def context_tokens(model: Model, profile: Profile) -> int:
    """Return the longest request: the profile's limit, or the model's native context."""
    return profile.limits.max_context_tokens or native_context_tokens(model)


def native_context_tokens(model: Model) -> int:
    """Return the longest context that the model was made for."""
    if isinstance(model, PlainModel):
        return plain_memory.context_tokens(model)
    return model.architecture.max_context_tokens


def shape_of(model: Model, profile: Profile, ranks: int = 1) -> CacheShape | None:
    """Return the block arithmetic of a model's cache; ``None`` when it is not known."""
    if isinstance(model, PlainModel):
        return plain_memory.cache_shape(model, profile)
    return cache_shape(of_one_rank(model.architecture, ranks), profile)


def cache_shape(model: Architecture, profile: Profile) -> CacheShape:
    """Return the block arithmetic of the cache."""
    drafts = profile.speculation.tokens if profile.speculation else 0
    layer_bytes = layer_bytes_per_token(model, profile.kv_cache.dtype)
    attention = model.attention_layers + (model.mtp_layers if own_drafts(profile) else 0)
    size = group_layers([attention, model.linear_layers])
    multiple = _block_multiple(model, profile)
    pages = math.ceil(state_bytes(model, drafts) / layer_bytes / multiple)
    block_tokens = max(1, pages) * multiple
    # With prefix caching a request also holds the state at the last block's edge.
    states = (2 if profile.prefix_caching else 1) + drafts
    return CacheShape(
        block_tokens=block_tokens,
        block_bytes=block_tokens * layer_bytes * size,
        attention_groups=math.ceil(attention / size),
        state_blocks=math.ceil(model.linear_layers / size) * states,
    )


def own_drafts(profile: Profile) -> int:
    """Return how many tokens the model's own layers draft in a step."""
    drafts = profile.speculation
    return drafts.tokens if drafts and drafts.by_own_layers else 0


def _block_multiple(model: Architecture, profile: Profile) -> int:
    """Return what a block is a multiple of.

    Where prefixes are kept, FlashInfer's prefill of linear layers hands its states out every 64
    tokens; the engine takes that prefill on a Spark by itself, for heads of 128.
    """
    net, chosen = model.linear_attention, prefill_backend(profile)
    by_flashinfer = net is not None and net.head_width == 128 and chosen != "triton"
    keeps = profile.prefix_caching and profile.engine_mode == "native"
    return 64 if keeps and by_flashinfer else 16


def layer_bytes_per_token(model: Architecture, dtype: str) -> int:
    """Return the bytes of one token in the cache of one layer with full attention."""
    if dtype in _TURBOQUANT:
        key_bits, value_bits, scales = _TURBOQUANT[dtype]
        head = model.head_width * (key_bits + value_bits) // 8 + scales
        return model.kv_heads * head
    width = 1 if dtype.startswith("fp8") else 2
    return 2 * model.kv_heads * model.head_width * width


def state_bytes(model: Architecture, drafts: int) -> int:
    """Bytes of one GDN state: FP32 recurrence and the 16-bit tail of the convolution."""
    net = model.linear_attention
    if net is None:
        return 0
    recurrence = net.value_heads * net.head_width**2 * 4
    width = (2 * net.key_heads + net.value_heads) * net.head_width
    return recurrence + (net.kernel - 1 + drafts) * width * 2


def gib(size_bytes: float) -> str:
    """Write bytes for people: ``67.4 GiB``."""
    return f"{size_bytes / GIB:.1f} GiB"
