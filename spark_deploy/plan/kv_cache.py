"""Compute the size of a KV-cache block, and the number of blocks per request.

In hybrid models (checked against vLLM's published block sizes), an attention page grows to the size
of a GDN state, and layers form groups of equal size. A request takes pages for its context in each
attention group, and a state in each GDN group.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from spark_deploy.config.catalog.architecture import Architecture, CacheLayers, MeasuredCache
from spark_deploy.config.catalog.model import Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.settings.engine import canonical_options, parse_whole_number

# (key bits, value bits, bytes of scales) per head and token.
TURBOQUANT = {
    "turboquant_k8v4": (8, 4, 4),
    "turboquant_4bit_nc": (4, 4, 6),
    "turboquant_k3v4_nc": (3, 4, 6),
    "turboquant_3bit_nc": (3, 3, 6),
}
_PAGE_TOKENS = 16
_GUESSED_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class CacheShape:
    block_tokens: int
    block_bytes: int  # per block, over all layers of a group
    attention_groups: int
    state_blocks: int  # blocks per request
    window_groups: int = 0  # of layers with sliding-window attention
    window_tokens: int = 0

    def request_blocks(self, tokens: int) -> int:
        blocks = self.attention_groups * math.ceil(tokens / self.block_tokens)
        if self.window_groups:
            # A window can start anywhere in a block: count an additional block.
            kept = math.ceil(min(tokens, self.window_tokens) / self.block_tokens) + 1
            blocks += self.window_groups * kept
        return blocks + self.state_blocks

    def capacity_tokens(self, cache_bytes: int, sequences: int, request_tokens: int) -> int:
        """Return the context tokens that fit next to the states of ``sequences`` requests."""
        blocks = cache_bytes // self.block_bytes
        if self.window_groups:
            return int(blocks / self.request_blocks(request_tokens) * request_tokens)
        available = max(blocks - self.state_blocks * sequences, 0)
        return available // max(1, self.attention_groups) * self.block_tokens


def context_tokens(model: Model, profile: Profile) -> int:
    """Return the maximum request length: the profile's limit, or the model's native context."""
    return profile.limits.max_context_tokens or native_context_tokens(model)


def native_context_tokens(model: Model) -> int:
    if isinstance(model, PlainModel):
        declared = model.metadata.context_tokens if model.metadata else None
        return declared or _GUESSED_CONTEXT_TOKENS
    return model.architecture.max_context_tokens


def mtp_drafts(profile: Profile) -> int:
    """Return how many tokens the model's own MTP layers draft per step."""
    drafts = profile.speculation
    return drafts.tokens if drafts and drafts.uses_model_layers else 0


def prefill_backend(profile: Profile) -> str:
    return str(canonical_options(profile.options).get("gdn-prefill-backend"))


def cache_shape(model: Model, profile: Profile, ranks: int = 1) -> CacheShape | None:
    """Return the cache's shape; ``None`` if unknown."""
    if isinstance(model, PlainModel):
        return _plain_shape(model, profile)
    return hybrid_shape(_rank_architecture(model.architecture, ranks), profile)


def hybrid_shape(model: Architecture, profile: Profile) -> CacheShape:
    drafts = profile.speculation.tokens if profile.speculation else 0
    layer_bytes = layer_bytes_per_token(model, profile.kv_cache.dtype)
    attention_layers = model.attention_layers + (model.mtp_layers if mtp_drafts(profile) else 0)
    layers_per_group = _layers_per_group([attention_layers, model.linear_layers])
    indexer = model.sparse_attention
    block_multiple = _block_multiple(model, profile)
    multiples = math.ceil(state_bytes(model, profile, drafts) / layer_bytes / block_multiple)
    block_tokens = max(1, multiples) * block_multiple
    index_bytes = 0
    if indexer:
        configured = parse_whole_number(canonical_options(profile.options).get("block-size"))
        block_tokens = max(block_tokens, configured or 0)
        # 16-bit keys: compressed keys, and a ring of keys that are not compressed yet.
        keys = block_tokens // indexer.compression + indexer.ring_tokens(drafts)
        index_bytes = keys * indexer.index_width * 2
    # The state of the n-gram layer has a different size, so it needs a separate group.
    state_groups = math.ceil(model.linear_layers / layers_per_group) + bool(model.ngram_table)
    return CacheShape(
        block_tokens=block_tokens,
        block_bytes=(block_tokens * layer_bytes + index_bytes) * layers_per_group,
        attention_groups=math.ceil(attention_layers / layers_per_group),
        state_blocks=state_groups * _states_per_request(profile) + bool(indexer),
    )


def _rank_architecture(model: Architecture, ranks: int) -> Architecture:
    """Return the architecture with one rank's heads; ranks share KV heads if there are too few."""
    net = model.linear_attention
    return replace(
        model,
        kv_heads=max(1, model.kv_heads // ranks),
        linear_attention=net
        and replace(net, key_heads=net.key_heads // ranks, value_heads=net.value_heads // ranks),
    )


def _states_per_request(profile: Profile) -> int:
    # With prefix caching, a request also keeps the state at the last block's edge.
    drafts = profile.speculation.tokens if profile.speculation else 0
    return (2 if profile.prefix_caching else 1) + drafts


def _block_multiple(model: Architecture, profile: Profile) -> int:
    """Return the number of tokens that a block size must be a multiple of.

    With prefix caching, FlashInfer's prefill of linear layers returns states every 64 tokens. On a
    Spark, the engine chooses that prefill for heads of 128.
    """
    net, backend = model.linear_attention, prefill_backend(profile)
    by_flashinfer = net is not None and net.head_width == 128 and backend != "triton"
    caches = profile.prefix_caching and profile.engine_mode == "native"
    return 64 if caches and by_flashinfer else 16


def layer_bytes_per_token(model: Architecture, dtype: str) -> int:
    if dtype in TURBOQUANT:
        key_bits, value_bits, scales = TURBOQUANT[dtype]
        head_bytes = model.head_width * (key_bits + value_bits) // 8 + scales
        return model.kv_heads * head_bytes
    value_bytes = 1 if dtype.startswith("fp8") else 2
    return 2 * model.kv_heads * model.head_width * value_bytes


def state_bytes(model: Architecture, profile: Profile, drafts: int) -> int:
    """Return the size of a GDN state: recurrence and convolution inputs, FP32 or 16-bit each."""
    net = model.linear_attention
    if net is None:
        return 0
    options = canonical_options(profile.options)
    is_short = options.get("mamba-ssm-cache-dtype") in ("bfloat16", "float16")
    recurrence = net.value_heads * net.head_width**2 * (2 if is_short else 4)
    width = (2 * net.key_heads + net.value_heads) * net.head_width
    input_bytes = 4 if options.get("mamba-cache-dtype") == "float32" else 2
    return recurrence + (net.kernel - 1 + drafts) * width * input_bytes


def _layers_per_group(kinds: Iterable[int]) -> int:
    counts = sorted(count for count in kinds if count) or [1]
    return counts[-1] if counts[-1] < 1.25 * counts[0] else counts[0]


def measured_cache(model: Model, profile: Profile) -> MeasuredCache | None:
    """Return an engine's measured cache size, if none can be computed and the profile matches."""
    if not isinstance(model, PlainModel):
        return None
    measured = model.metadata.measured if model.metadata and model.metadata.cache_unknown else None
    matches = measured is not None and measured.kv_cache == profile.kv_cache.dtype
    return measured if matches and profile.speculation is None else None


def _plain_shape(model: PlainModel, profile: Profile) -> CacheShape | None:
    """Return the cache shape of a published model; ``None`` if unknown."""
    if (measured := measured_cache(model, profile)) is not None:
        page_bytes = _PAGE_TOKENS * measured.token_bytes
        return CacheShape(_PAGE_TOKENS, page_bytes, attention_groups=1, state_blocks=0)
    metadata, relative_size = model.metadata, relative_cache_size(profile.kv_cache.dtype)
    if metadata is None or metadata.cache_unknown or not metadata.cache or relative_size is None:
        return None
    drafter = profile.speculation.metadata if profile.speculation else None
    if drafter is not None and drafter.cache_unknown:
        return None
    layers = (*metadata.cache, *(drafter.cache if drafter else ()))
    states = [layer for layer in layers if layer.kind == "state"]
    attention = [layer for layer in layers if layer.kind != "state"]
    configured = parse_whole_number(canonical_options(profile.options).get("block-size"))
    page_tokens = configured or _PAGE_TOKENS
    token_sizes = {max(1, round(layer.token_bytes * relative_size)) for layer in attention}
    if len(token_sizes) != 1 or len(states) > 1:
        return _upper_bound_shape(layers, relative_size, page_tokens)
    return _grouped_shape(attention, states, token_sizes.pop(), page_tokens, profile)


def _grouped_shape(
    attention: list[CacheLayers],
    states: list[CacheLayers],
    token_bytes: int,
    page_tokens: int,
    profile: Profile,
) -> CacheShape:
    """Return the cache shape of layers whose tokens have equal size, with groups as in vLLM."""
    drafts = profile.speculation.tokens if profile.speculation else 0
    full = sum(layer.layers for layer in attention if layer.kind != "sliding")
    sliding = sum(layer.layers for layer in attention if layer.kind == "sliding")
    linear = sum(layer.layers for layer in states)
    layers_per_group = _layers_per_group([full, sliding, linear])
    state_bytes = sum(layer.state_bytes + drafts * layer.draft_state_bytes for layer in states)
    block_tokens = max(1, math.ceil(state_bytes / token_bytes / page_tokens)) * page_tokens
    return CacheShape(
        block_tokens=block_tokens,
        block_bytes=block_tokens * token_bytes * layers_per_group,
        attention_groups=math.ceil(full / layers_per_group),
        state_blocks=math.ceil(linear / layers_per_group) * _states_per_request(profile),
        window_groups=math.ceil(sliding / layers_per_group),
        # The cache also contains the tokens of the current step.
        window_tokens=max((layer.window_tokens for layer in attention), default=0)
        + profile.limits.max_batched_tokens,
    )


def _upper_bound_shape(
    layers: tuple[CacheLayers, ...], relative_size: float, page_tokens: int
) -> CacheShape:
    """Return an upper bound, as if each layer kept the whole context."""
    per_token = sum(round(layer.token_bytes * relative_size) * layer.layers for layer in layers)
    states = sum(layer.state_bytes * layer.layers for layer in layers)
    block_bytes = max(1, per_token) * page_tokens
    state_blocks = math.ceil(states / block_bytes)
    return CacheShape(page_tokens, block_bytes, attention_groups=1, state_blocks=state_blocks)


def relative_cache_size(dtype: str) -> float | None:
    """Return the size of a cache type relative to 16 bits; ``None`` if unknown."""
    if dtype in ("auto", "bfloat16", "float16"):
        return 1.0
    return 0.5 if dtype.startswith("fp8") else None
