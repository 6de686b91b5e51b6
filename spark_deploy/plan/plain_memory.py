"""Bytes of a repository that is served as published: from its headers and its config.json."""

from __future__ import annotations

import math
from collections.abc import Iterable

from spark_deploy.config.catalog.anatomy import CacheLayers, CountedCache
from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.plan.disk import CacheShape, group_layers
from spark_deploy.plan.engine_options import block_tokens

_PAGE_TOKENS = 16
_GUESSED_CONTEXT_TOKENS = 8192


def loaded_bytes(model: PlainModel, profile: Profile) -> tuple[int, int]:
    """Return the bytes of the loaded weights and of the drafter; 0 while nobody read the files."""
    anatomy = model.anatomy
    if anatomy is None:
        return 0, 0
    factor = model.memory.weights_factor
    own = profile.speculation is not None and profile.speculation.by_own_layers
    drafter = anatomy.drafter_bytes if own else 0
    body = round(anatomy.weights_bytes * factor) + vision_bytes(model, profile)
    return body, round(drafter * factor)


def vision_bytes(model: PlainModel, profile: Profile) -> int:
    """Return what towers take of the weights; the engine drops them where pictures are off."""
    return model.anatomy.vision_bytes if model.anatomy and keeps_vision(model, profile) else 0


def keeps_vision(model: PlainModel, profile: Profile) -> bool:
    """Whether the engine loads the towers: it is told to drop those it could use."""
    return profile.vision or not model.vision or model.audio


def context_tokens(model: PlainModel) -> int:
    """Return the model's longest context."""
    found = model.anatomy.context_tokens if model.anatomy else None
    return found or _GUESSED_CONTEXT_TOKENS


def unknown(model: PlainModel, profile: Profile) -> tuple[str, ...]:
    """Return what of the memory cannot be computed, and why."""
    anatomy = model.anatomy
    if anatomy is None or not anatomy.weights:
        return ("weights, context and KV cache: the repository's headers are not read yet",)
    said = []
    drafter = profile.speculation.anatomy if profile.speculation else None
    if anatomy.cache_unknown and counted(model, profile) is None:
        said.append(f"KV cache of a token: {anatomy.cache_unknown}")
    elif drafter is not None and drafter.cache_unknown:
        said.append(f"KV cache of a token, the drafter's: {drafter.cache_unknown}")
    elif _width(profile.kv_cache.dtype) is None and anatomy.cache:
        said.append(f"KV cache of a token: not worked out for {profile.kv_cache.dtype}")
    if anatomy.context_tokens is None:
        said.append("longest context: config.json says none; set engine.max_context_tokens")
    return tuple(said)


def cache_shape(model: PlainModel, profile: Profile) -> CacheShape | None:
    """Return the block arithmetic of the cache; ``None`` when it is not known, or there is none."""
    if (found := counted(model, profile)) is not None:
        return CacheShape(_PAGE_TOKENS, _PAGE_TOKENS * found.token_bytes, 1, 0)
    anatomy, width = model.anatomy, _width(profile.kv_cache.dtype)
    if anatomy is None or anatomy.cache_unknown or not anatomy.cache or width is None:
        return None
    drafter = profile.speculation.anatomy if profile.speculation else None
    if drafter is not None and drafter.cache_unknown:
        return None
    layers = (*anatomy.cache, *(drafter.cache if drafter else ()))
    states = [one for one in layers if one.kind == "state"]
    keeping = [one for one in layers if one.kind != "state"]
    sizes = {max(1, round(one.token_bytes * width)) for one in keeping}
    if len(sizes) != 1 or len(states) > 1:
        return _summed(layers, width, _page_tokens(profile))
    return _grouped(keeping, states, sizes.pop(), profile)


def counted(model: PlainModel, profile: Profile) -> CountedCache | None:
    """Return what an engine counted of a cache that is not known, where it is this one."""
    found = model.anatomy.counted if model.anatomy and model.anatomy.cache_unknown else None
    same = found is not None and found.kv_cache == profile.kv_cache.dtype
    return found if same and profile.speculation is None else None


def _grouped(
    keeping: list[CacheLayers], states: list[CacheLayers], token_bytes: int, profile: Profile
) -> CacheShape:
    """As the engine does: equal groups of layers, and a page that holds one state."""
    drafts = profile.speculation.tokens if profile.speculation else 0
    full = sum(one.layers for one in keeping if one.kind != "sliding")
    sliding = sum(one.layers for one in keeping if one.kind == "sliding")
    linear = sum(one.layers for one in states)
    size = group_layers([full, sliding, linear])
    state_bytes = sum(one.state_bytes + drafts * one.draft_state_bytes for one in states)
    page_tokens = _page_tokens(profile)
    pages = max(1, math.ceil(state_bytes / token_bytes / page_tokens))
    block_tokens = pages * page_tokens
    return CacheShape(
        block_tokens=block_tokens,
        block_bytes=block_tokens * token_bytes * size,
        attention_groups=math.ceil(full / size),
        state_blocks=math.ceil(linear / size) * ((2 if profile.prefix_caching else 1) + drafts),
        window_groups=math.ceil(sliding / size),
        # What one step computes lies there as well.
        window_tokens=max((one.window_tokens for one in keeping), default=0)
        + profile.limits.max_batched_tokens,
    )


def _summed(layers: Iterable[CacheLayers], width: float, page_tokens: int) -> CacheShape:
    """Layers of several sizes: all counted as if they kept the whole context, which is too much."""
    layers = tuple(layers)
    per_token = sum(round(one.token_bytes * width) * one.layers for one in layers)
    states = sum(one.state_bytes * one.layers for one in layers)
    block_bytes = max(1, per_token) * page_tokens
    return CacheShape(page_tokens, block_bytes, 1, math.ceil(states / block_bytes))


def _page_tokens(profile: Profile) -> int:
    """Return how many tokens one block of the cache holds at least."""
    return block_tokens(profile) or _PAGE_TOKENS


def _width(dtype: str) -> float | None:
    """Return the bytes of a cache beside 16 bit; ``None`` for those nobody worked out."""
    if dtype in ("auto", "bfloat16", "float16"):
        return 1.0
    return 0.5 if dtype.startswith("fp8") else None
