"""What to say when memory does not suffice: the cheapest changes that would make it fit.

Every change is one of settings and is tried by judging the pair again with it, guard rails
included: what is suggested can be chosen, and fits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spark_deploy.catalog.model import HybridModel, Model
from spark_deploy.catalog.profile import Profile
from spark_deploy.catalog.types import Catalog
from spark_deploy.errors import PlanError
from spark_deploy.planning.budget.memory import (
    GIB,
    context_tokens,
    gib,
    loaded_bytes,
    missing_bytes,
    runtime_bytes,
)
from spark_deploy.planning.budget.weights import weights_of
from spark_deploy.settings.types import Settings

_WAYS = 3
_MOST_HOSTS = 8
_LEAST_RESERVE_GIB = 8
_LEAST_CONTEXT_TOKENS = 8192
_USUAL_FRACTION = 0.8

Change = Callable[[Settings], Settings]
Fits = Callable[[Settings], bool]


@dataclass(frozen=True, slots=True)
class Lever:
    """One change a user can make, in the words of the settings."""

    what: str
    setting: str  # two changes of one setting are no way
    change: Change


def refusal(
    model: Model, profile: Profile, settings: Settings, catalog: Catalog, fits: Fits
) -> PlanError:
    """Return the error that says what is missing and the three cheapest ways to fit.

    ``fits`` judges settings the way a plan does.
    """
    weights, drafter = loaded_bytes(model, profile, settings.ranks)
    where = "one host" if settings.ranks == 1 else f"{settings.ranks} hosts, on each"
    memory = settings.memory
    what = (
        f"does not fit on {where}: weights {gib(weights)}, drafter {gib(drafter)}, runtime "
        f"{gib(runtime_bytes(model, profile))} and the KV cache of one request of "
        f"{context_tokens(model, profile):,} tokens are "
        f"{gib(missing_bytes(model, profile, settings))} more than the engine may take of "
        f"{gib(memory.total_bytes)} ({gib(settings.kept_bytes)} stay reserved)"
    )
    levers = list(_levers(model, profile, settings, catalog, fits))
    ways = ways_to_fit(levers, settings, fits)
    fix = "; or ".join([*ways, *_smaller_model(model, profile, settings, catalog, fits)][:_WAYS])
    if not ways:
        together = _hosts_needed(settings, fits)
        more = f", or {together} hosts that serve it together (cluster.hosts)" if together else ""
        fix = (
            f"no setting makes it fit, its weights alone are {gib(weights)}: "
            f"{fix or 'choose a smaller model'}{more}"
        )
    return PlanError.one(f"model {model.name} with profile {profile.name}", what, fix)


def _hosts_needed(settings: Settings, fits: Fits) -> int | None:
    """Return the fewest hosts that can serve the model together as it is."""
    for count in range(settings.ranks + 1, _MOST_HOSTS + 1):
        hosts = tuple(f"host-{number}" for number in range(count))
        cluster = replace(settings.cluster, hosts=hosts)
        if fits(replace(settings, cluster=cluster)):
            return count
    return None


def ways_to_fit(levers: Sequence[Lever], settings: Settings, fits: Fits) -> list[str]:
    """Return up to three ways, the least intrusive first: single changes, then pairs and so on."""
    ways: list[tuple[Lever, ...]] = []
    for size in range(1, len({lever.setting for lever in levers}) + 1):
        for chosen in itertools.combinations(levers, size):
            if len(ways) == _WAYS:
                break
            once = len({lever.setting for lever in chosen}) == size
            known = any(set(way) <= set(chosen) for way in ways)
            changed = functools.reduce(lambda so_far, one: one.change(so_far), chosen, settings)
            if once and not known and fits(changed):
                ways.append(chosen)
    return [" and ".join(lever.what for lever in way) for way in ways]


def _smaller_model(
    model: Model, profile: Profile, settings: Settings, catalog: Catalog, fits: Fits
) -> list[str]:
    """Name the largest model that fits as it is and takes requests as long; it answers otherwise.

    Empty when there is none.
    """
    if not isinstance(model, HybridModel):
        return []  # for what somebody chose a repository, another one may be no answer at all
    wanted = context_tokens(model, profile)
    fitting = [
        other
        for other in catalog.models.values()
        if isinstance(other, HybridModel)
        and other.name != model.name
        and other.architecture.max_context_tokens >= wanted
        and fits(_set(model=other.name)(settings))
    ]
    largest = max(fitting, key=lambda one: weights_of(one.architecture).tree_bytes, default=None)
    return [f"choose model {largest.name}"] if largest else []


def _levers(
    model: Model, profile: Profile, settings: Settings, catalog: Catalog, fits: Fits
) -> Iterator[Lever]:
    """Changes that apply here, in the order of what they cost a user."""
    if profile.vision:
        yield Lever("set engine.vision to false", "vision", _engine(vision=False))
    if settings.engine.kv_cache_bytes is not None:
        yield Lever("drop engine.kv_cache_gib", "cache", _engine(kv_cache_bytes=None))
    pinned = profile.kv_cache.size_bytes is not None
    if not pinned and profile.limits.memory_fraction < _USUAL_FRACTION:
        what = f"raise engine.memory_fraction to {_USUAL_FRACTION}"
        yield Lever(what, "fraction", _engine(memory_fraction=_USUAL_FRACTION))
    reserve_gib = _largest_reserve_gib(settings, fits)
    if settings.memory.reserve_bytes > reserve_gib * GIB:
        what = f"lower memory.reserve_gib to {reserve_gib}"
        yield Lever(what, "reserve", _reserve(reserve_gib))
    share_gib = _largest_share_gib(settings, fits)
    if settings.services and share_gib < _share_gib(settings):
        names = ", ".join(f"services.{name}.memory_gib" for name in settings.services)
        yield Lever(f"lower {names} to {share_gib} together", "services", _share(share_gib))
    context = _longest_context(settings, context_tokens(model, profile) // 2, fits)
    if context >= _LEAST_CONTEXT_TOKENS:
        what = f"set engine.max_context_tokens to {context}"
        yield Lever(what, "context", _engine(max_context_tokens=context))
    for name in _others_like(profile, model, catalog):
        yield Lever(f"choose profile {name}", "profile", _set(profile=name))


def _others_like(profile: Profile, model: Model, catalog: Catalog) -> list[str]:
    """Return the other profiles, those first that are most like this one."""
    others = [one for (_, served), one in sorted(catalog.profiles.items()) if served == model.name]
    others.sort(
        key=lambda one: (
            (one.speculation is None) != (profile.speculation is None),
            one.plugin != profile.plugin,
        )
    )
    return [other.name for other in others if other.name != profile.name]


def _set(**fields: Any) -> Change:
    return lambda settings: replace(settings, **fields)


def _engine(**fields: Any) -> Change:
    return lambda settings: replace(settings, engine=replace(settings.engine, **fields))


def _reserve(size_gib: int) -> Change:
    return lambda settings: replace(
        settings, memory=replace(settings.memory, reserve_bytes=size_gib * GIB)
    )


def _largest_reserve_gib(settings: Settings, fits: Fits) -> int:
    """Return the most that can stay reserved if nothing else changes; else the least there is."""
    for size_gib in range(settings.memory.reserve_bytes // GIB, _LEAST_RESERVE_GIB, -1):
        if fits(_reserve(size_gib)(settings)):
            return size_gib
    return _LEAST_RESERVE_GIB


def _share_gib(settings: Settings) -> int:
    """Return what the services beside the main one may take together."""
    return sum(one.memory_bytes for one in settings.services.values()) // GIB


def _share(size_gib: int) -> Change:
    """Lower what services may take to this size together, each by the same part."""

    def change(settings: Settings) -> Settings:
        part = size_gib / max(1, _share_gib(settings))
        services = {
            name: replace(one, memory_bytes=int(one.memory_bytes * part))
            for name, one in settings.services.items()
        }
        return replace(settings, services=services)

    return change


def _largest_share_gib(settings: Settings, fits: Fits) -> int:
    """Return the most that services can take if nothing else changes; else a GiB for each."""
    most_gib = min(_share_gib(settings) - 1, settings.memory.total_bytes // GIB)
    for size_gib in range(most_gib, len(settings.services), -1):
        if fits(_share(size_gib)(settings)):
            return size_gib
    return len(settings.services)


def _longest_context(settings: Settings, half_tokens: int, fits: Fits) -> int:
    """Return the longest of the halved contexts that fits by itself; else the first half."""
    tokens = half_tokens
    while tokens >= _LEAST_CONTEXT_TOKENS:
        if fits(_engine(max_context_tokens=tokens)(settings)):
            return tokens
        tokens //= 2
    return half_tokens
