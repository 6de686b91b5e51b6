"""What to say when memory does not suffice: the cheapest changes that would make it fit.

Every change is tried by planning again with it, so what is suggested really fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from spark_deploy.catalog import Model, Profile
from spark_deploy.errors import PlanError
from spark_deploy.plan.memory import (
    GIB,
    context_tokens,
    gib,
    loaded_bytes,
    missing_bytes,
    runtime_bytes,
)
from spark_deploy.settings_types import Settings

Change = Callable[[Profile, Settings], tuple[Profile, Settings]]


@dataclass(frozen=True, slots=True)
class Lever:
    """One change a user can make, in the words of the settings."""

    what: str
    change: Change


def refusal(model: Model, profile: Profile, settings: Settings) -> PlanError:
    """Return the error that says what is missing and the three cheapest ways to fit."""
    weights, drafter = loaded_bytes(model, profile)
    memory = settings.memory
    what = (
        f"does not fit on one host: weights {gib(weights)}, drafter {gib(drafter)}, runtime "
        f"{gib(runtime_bytes(model, profile))} and the KV cache of one request of "
        f"{context_tokens(model, profile):,} tokens are "
        f"{gib(missing_bytes(model, profile, settings))} more than the engine may take of "
        f"{gib(memory.total_bytes)} ({gib(memory.reserve_bytes)} stay reserved)"
    )
    ways = ways_to_fit(model, profile, settings)
    fix = "; or ".join(ways) or (
        f"no setting makes it fit, its weights alone are {gib(weights)}: choose a smaller model, "
        "or more hosts that serve it together"
    )
    return PlanError.one(f"model {model.name} with profile {profile.name}", what, fix)


def ways_to_fit(model: Model, profile: Profile, settings: Settings) -> list[str]:
    """Return up to three ways, the least intrusive first: single changes, then pairs and so on."""
    levers = _levers(model, profile, settings)
    ways: list[tuple[Lever, ...]] = []
    for size in range(1, len(levers) + 1):
        for chosen in itertools.combinations(levers, size):
            if len(ways) == 3:
                break
            if not any(set(way) <= set(chosen) for way in ways) and _fits(
                model, profile, settings, chosen
            ):
                ways.append(chosen)
    return [" and ".join(lever.what for lever in way) for way in ways]


def _fits(model: Model, profile: Profile, settings: Settings, levers: tuple[Lever, ...]) -> bool:
    for lever in levers:
        profile, settings = lever.change(profile, settings)
    return missing_bytes(model, profile, settings) <= 0


def _levers(model: Model, profile: Profile, settings: Settings) -> list[Lever]:
    """Changes that apply here, in the order of what they cost a user."""
    limits, cache = profile.limits, profile.kv_cache
    half = context_tokens(model, profile) // 2
    possible = [
        (profile.vision, Lever("set engine.vision to false", _with(vision=False))),
        (
            cache.size_bytes is not None,
            Lever("drop engine.kv_cache_gib", _with(kv_cache=replace(cache, size_bytes=None))),
        ),
        (
            cache.size_bytes is None and limits.memory_fraction < 0.85,
            Lever(
                "raise engine.memory_fraction to 0.85",
                _fraction,
            ),
        ),
        (settings.memory.reserve_bytes > 8 * GIB, Lever("lower memory.reserve_gib to 8", _reserve)),
        (
            half >= 8192,
            Lever(f"set engine.max_context_tokens to {half}", _context(half)),
        ),
        (
            profile.speculation is not None,
            Lever("choose a profile without draft tokens", _with(speculation=None)),
        ),
        (
            profile.plugin and not cache.dtype.startswith("turboquant"),
            Lever(
                "choose a profile with a TurboQuant cache (v2-tq)",
                _with(kv_cache=replace(cache, dtype="turboquant_k8v4")),
            ),
        ),
    ]
    return [lever for applies, lever in possible if applies]


def _with(**fields: object) -> Change:
    def change(profile: Profile, settings: Settings) -> tuple[Profile, Settings]:
        return replace(profile, **fields), settings  # type: ignore[arg-type]  # fields of Profile

    return change


def _context(tokens: int) -> Change:
    def change(profile: Profile, settings: Settings) -> tuple[Profile, Settings]:
        limits = replace(profile.limits, max_context_tokens=tokens)
        return replace(profile, limits=limits), settings

    return change


def _fraction(profile: Profile, settings: Settings) -> tuple[Profile, Settings]:
    return replace(profile, limits=replace(profile.limits, memory_fraction=0.85)), settings


def _reserve(profile: Profile, settings: Settings) -> tuple[Profile, Settings]:
    memory = replace(settings.memory, reserve_bytes=8 * GIB)
    return profile, replace(settings, memory=memory)
