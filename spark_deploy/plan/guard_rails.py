"""Compare a planned release with the rules of ``catalog/guard_rails.yml``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spark_deploy.catalog import GuardRail, Model, Profile
from spark_deploy.errors import PlanError, Problem
from spark_deploy.plan.types import MemoryPlan


def facts_of(model: Model, profile: Profile, memory: MemoryPlan) -> dict[str, Any]:
    """Return what rules may speak about."""
    options = {key.replace("_", "-"): value for key, value in profile.options.items()}
    compilation = options.get("compilation-config")
    mode = compilation.get("cudagraph_mode") if isinstance(compilation, dict) else None
    return {
        "model": model.name,
        "profile": profile.name,
        "kv_cache": profile.kv_cache.dtype,
        "speculation_tokens": profile.speculation.tokens if profile.speculation else 0,
        "prefix_caching": profile.prefix_caching,
        "max_sequences": profile.limits.max_sequences,
        "max_batched_tokens": profile.limits.max_batched_tokens,
        "memory_fraction": memory.memory_fraction,
        "block_tokens": memory.block_tokens,
        "attention_backend": options.get("attention-backend"),
        "has_attention_backend": "attention-backend" in options,
        "eager": bool(options.get("enforce-eager")),
        "piecewise_graphs": mode == "PIECEWISE",
        "plugin": profile.plugin,
        "shared_experts": profile.shared_experts,
        "head": profile.head,
        "vision": profile.vision,
        "load_format": profile.load_format,
    }


def apply_rails(rails: Sequence[GuardRail], facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the warnings, or raise one error with every refusal."""
    hits = [rail for rail in rails if _applies(rail, facts)]
    refused = [
        Problem(
            f"model {facts['model']} with profile {facts['profile']}",
            f"refused by guard rail {rail.rule}: {rail.reason} ({rail.source})",
            rail.fix,
        )
        for rail in hits
        if rail.effect == "refuse"
    ]
    if refused:
        raise PlanError(refused)
    return tuple(f"{rail.rule}: {rail.reason}; {rail.fix} ({rail.source})" for rail in hits)


def _applies(rail: GuardRail, facts: Mapping[str, Any]) -> bool:
    return all(_holds(facts[fact], comparison, facts) for fact, comparison in rail.applies.items())


def _holds(value: Any, comparison: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    how, other = next(iter(comparison.items()))
    if how == "is":
        return bool(value == other)
    if how == "starts_with":
        return str(value).startswith(str(other))
    if how == "above":
        return bool(value > other)
    if how == "below":
        return bool(value < other)
    return bool(value < facts[other])
