"""What to say when memory does not suffice: the cheapest changes that would make it fit.

Every change is one of settings and is tried by judging the pair again with it, guard rails
included: what is suggested can be chosen, and fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from spark_deploy.catalog.load import Model, Profile, load_guard_rails, load_model, load_profile
from spark_deploy.checkout import catalog_names
from spark_deploy.errors import PlanError, SparkError
from spark_deploy.planning.budget.memory import (
    GIB,
    context_tokens,
    gib,
    loaded_bytes,
    missing_bytes,
    plan_memory,
    runtime_bytes,
)
from spark_deploy.planning.budget.weights import weights_of
from spark_deploy.planning.effective import effective_profile
from spark_deploy.planning.guard_rails import apply_rails, facts_of
from spark_deploy.planning.work.checkpoint import refuse_impossible_trees
from spark_deploy.settings.types import Settings

_WAYS = 3
_LEAST_RESERVE_GIB = 8
_LEAST_CONTEXT_TOKENS = 8192
_USUAL_FRACTION = 0.85

Change = Callable[[Settings], Settings]


@dataclass(frozen=True, slots=True)
class Lever:
    """One change a user can make, in the words of the settings."""

    what: str
    setting: str  # two changes of one setting are no way
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
    fix = "; or ".join([*ways, *_smaller_model(model, profile, settings)][:_WAYS])
    if not ways:
        fix = (
            f"no setting makes it fit, its weights alone are {gib(weights)}: "
            f"{fix or 'choose a smaller model'}, or more hosts that serve it together"
        )
    return PlanError.one(f"model {model.name} with profile {profile.name}", what, fix)


def ways_to_fit(model: Model, profile: Profile, settings: Settings) -> list[str]:
    """Return up to three ways, the least intrusive first: single changes, then pairs and so on."""
    levers = _levers(model, profile, settings)
    ways: list[tuple[Lever, ...]] = []
    for size in range(1, len({lever.setting for lever in levers}) + 1):
        for chosen in itertools.combinations(levers, size):
            if len(ways) == _WAYS:
                break
            once = len({lever.setting for lever in chosen}) == size
            known = any(set(way) <= set(chosen) for way in ways)
            if once and not known and _fits(settings, *(lever.change for lever in chosen)):
                ways.append(chosen)
    return [" and ".join(lever.what for lever in way) for way in ways]


def _smaller_model(model: Model, profile: Profile, settings: Settings) -> list[str]:
    """Name the largest model that fits as it is and takes requests as long; it answers otherwise.

    Empty when there is none.
    """
    wanted = context_tokens(model, profile)
    others = [load_model(name) for name in catalog_names("models") if name != model.name]
    fitting = [
        other
        for other in others
        if other.architecture.max_context_tokens >= wanted
        and _fits(settings, _set(model=other.name))
    ]
    largest = max(fitting, key=lambda one: weights_of(one.architecture).tree_bytes, default=None)
    return [f"choose model {largest.name}"] if largest else []


def _fits(settings: Settings, *changes: Change) -> bool:
    for change in changes:
        settings = change(settings)
    model = load_model(settings.model)
    profile = effective_profile(load_profile(settings.profile, settings.model), settings)
    if missing_bytes(model, profile, settings) > 0:
        return False
    try:
        refuse_impossible_trees(model, profile, settings)
        facts = facts_of(model, profile, plan_memory(model, profile, settings), settings)
        apply_rails(load_guard_rails(), facts)
    except SparkError:
        return False
    return True


def _levers(model: Model, profile: Profile, settings: Settings) -> list[Lever]:
    """Changes that apply here, in the order of what they cost a user."""
    engine, memory = settings.engine, settings.memory
    reserve_gib = _largest_reserve_gib(settings)
    context = _longest_context(settings, context_tokens(model, profile) // 2)
    possible = [
        (profile.vision, Lever("set engine.vision to false", "vision", _engine(vision=False))),
        (
            engine.kv_cache_bytes is not None,
            Lever("drop engine.kv_cache_gib", "cache", _engine(kv_cache_bytes=None)),
        ),
        (
            profile.kv_cache.size_bytes is None
            and profile.limits.memory_fraction < _USUAL_FRACTION,
            Lever(
                f"raise engine.memory_fraction to {_USUAL_FRACTION}",
                "fraction",
                _engine(memory_fraction=_USUAL_FRACTION),
            ),
        ),
        (
            memory.reserve_bytes > reserve_gib * GIB,
            Lever(f"lower memory.reserve_gib to {reserve_gib}", "reserve", _reserve(reserve_gib)),
        ),
        (
            context >= _LEAST_CONTEXT_TOKENS,
            Lever(
                f"set engine.max_context_tokens to {context}",
                "context",
                _engine(max_context_tokens=context),
            ),
        ),
    ]
    usual = [lever for applies, lever in possible if applies]
    return usual + [
        Lever(f"choose profile {name}", "profile", _set(profile=name))
        for name in _others_like(profile, model)
    ]


def _others_like(profile: Profile, model: Model) -> list[str]:
    """Return the other profiles, those first that are most like this one."""
    others = [load_profile(name, model.name) for name in catalog_names("profiles")]
    return [
        other.name
        for other in sorted(
            others,
            key=lambda one: (
                (one.speculation is None) != (profile.speculation is None),
                one.plugin != profile.plugin,
            ),
        )
        if other.name != profile.name
    ]


def _set(**fields: Any) -> Change:
    return lambda settings: replace(settings, **fields)


def _engine(**fields: Any) -> Change:
    return lambda settings: replace(settings, engine=replace(settings.engine, **fields))


def _reserve(size_gib: int) -> Change:
    return lambda settings: replace(
        settings, memory=replace(settings.memory, reserve_bytes=size_gib * GIB)
    )


def _largest_reserve_gib(settings: Settings) -> int:
    """Return the most that can stay reserved if nothing else changes; else the least there is."""
    for size_gib in range(settings.memory.reserve_bytes // GIB, _LEAST_RESERVE_GIB, -1):
        if _fits(settings, _reserve(size_gib)):
            return size_gib
    return _LEAST_RESERVE_GIB


def _longest_context(settings: Settings, half_tokens: int) -> int:
    """Return the longest of the halved contexts that fits by itself; else the first half."""
    tokens = half_tokens
    while tokens >= _LEAST_CONTEXT_TOKENS:
        if _fits(settings, _engine(max_context_tokens=tokens)):
            return tokens
        tokens //= 2
    return half_tokens
