"""A profile as one host serves it."""

from __future__ import annotations

import dataclasses

from spark_deploy.catalog.profile import Profile
from spark_deploy.settings.types import Settings


def effective_profile(profile: Profile, settings: Settings) -> Profile:
    """Return the profile with the ``engine`` and ``checkpoint`` settings of the host put in."""
    engine = settings.engine
    limits = dataclasses.replace(
        profile.limits,
        max_context_tokens=engine.max_context_tokens or profile.limits.max_context_tokens,
        max_sequences=engine.max_sequences or profile.limits.max_sequences,
        memory_fraction=engine.memory_fraction or profile.limits.memory_fraction,
    )
    cache = profile.kv_cache
    if engine.kv_cache_bytes is not None:
        cache = dataclasses.replace(cache, size_bytes=engine.kv_cache_bytes)
    shared_experts = profile.shared_experts
    if settings.checkpoint.prebuilt and shared_experts == "fp8-donor":
        shared_experts = "fp8-base"
    return dataclasses.replace(
        profile,
        shared_experts=shared_experts,
        layout=settings.checkpoint.layout or profile.layout,
        limits=limits,
        kv_cache=cache,
        vision=profile.vision if engine.vision is None else engine.vision,
        options={**profile.options, **engine.options},
        environment={**profile.environment, **engine.environment},
    )
