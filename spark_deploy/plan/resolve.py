"""Resolve model and profile of the settings, check that they can be served, suggest changes."""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from spark_deploy.config.catalog.model import HybridModel, Model
from spark_deploy.config.catalog.profile import Profile, Speculation
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.documents import GIB
from spark_deploy.config.errors import PlanError, Problem, SparkError
from spark_deploy.config.settings.engine import KvCache, Limits
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.types import Lock
from spark_deploy.plan import guard_rails as rails
from spark_deploy.plan.artifacts import reject_unbuildable_checkpoint
from spark_deploy.plan.kv_cache import context_tokens
from spark_deploy.plan.memory import (
    gib,
    loaded_bytes,
    missing_bytes,
    plan_memory,
    runtime_bytes,
    weight_sizes,
)
from spark_deploy.plan.types import MemoryPlan, PayloadIdentity, Ports

_Part = TypeVar("_Part", Profile, Limits, KvCache, Speculation)
# For drafts that only the settings enable: a drafter without weights is accepted almost never.
_ACCEPTANCE_FLOOR = 0.5
_MAX_SUGGESTIONS = 3
_MAX_HOSTS = 8
_MIN_RESERVE_GIB = 8
_MIN_CONTEXT_TOKENS = 8192
_USUAL_FRACTION, _SAFE_FRACTION = 0.8, 0.82  # guard rail memory-fraction-high

Fits = Callable[[Settings], bool]


def effective_profile(profile: Profile, settings: Settings) -> Profile:
    """Return the profile with the values that the settings override."""
    overrides = {f.name: getattr(settings.engine, f.name) for f in fields(settings.engine)}
    if settings.ranks > 1 or settings.engine.head not in (None, "int8-triton"):
        # There the profile's draft vocabulary cannot be used; guard rails reject the settings'.
        overrides["draft_vocabulary_tokens"] = settings.engine.draft_vocabulary_tokens or 0
    if settings.checkpoint.source == "prebuilt" and profile.shared_experts == "fp8-donor":
        profile = replace(profile, shared_experts="fp8-base")
    if settings.engine.drafts is not None:
        profile = with_drafts(profile, settings.engine.drafts)
    parts = {
        "limits": _override_fields(profile.limits, overrides),
        "speculation": profile.speculation and _override_fields(profile.speculation, overrides),
        "kv_cache": _override_fields(profile.kv_cache, {"size_gib": settings.engine.kv_cache_gib}),
        "layout": settings.checkpoint.layout,
    }
    return _override_fields(profile, {**overrides, **parts})


def with_drafts(profile: Profile, tokens: int) -> Profile:
    """Return the profile with this many drafts, and with an acceptance check if there are any."""
    if not tokens:
        return replace(profile, speculation=None)
    drafts = profile.speculation or Speculation(method="mtp", tokens=tokens)
    schedule = drafts.num_speculative_tokens_per_batch_size if tokens <= drafts.tokens else None
    floor = profile.check.acceptance_floor or _ACCEPTANCE_FLOOR
    return replace(
        profile,
        speculation=replace(drafts, tokens=tokens, num_speculative_tokens_per_batch_size=schedule),
        check=replace(profile.check, acceptance_floor=floor),
    )


def _override_fields(part: _Part, overrides: Mapping[str, Any]) -> _Part:
    changed: dict[str, Any] = {}
    for item in fields(part):
        value, old = overrides.get(item.name), getattr(part, item.name)
        if value not in (None, {}) and value is not old:
            changed[item.name] = {**old, **value} if isinstance(value, dict) else value
    return replace(part, **changed) if changed else part


@dataclass(frozen=True, slots=True)
class Request:
    host: str
    settings: Settings
    catalog: Catalog
    lock: Lock
    payload: PayloadIdentity
    # Ports of the cluster's hosts; if empty, addresses stay placeholders.
    fabric: Mapping[str, Ports] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model and profile that fit in memory and pass all rules."""

    model: Model
    profile: Profile  # with the host's settings applied
    settings: Settings  # for this model and profile
    memory: MemoryPlan
    warnings: tuple[str, ...]


def resolve(settings: Settings, catalog: Catalog) -> Resolved:
    """Return model and profile of the settings.

    Raises SparkError with every reason why they cannot be served, and how to fix it.
    """
    resolved = _resolve_if_fits(settings, catalog)
    if resolved is None:
        model, profile = model_and_profile(settings, catalog)
        raise _memory_error(model, profile, settings, catalog, lambda s: can_serve(s, catalog))
    return resolved


def resolve_service(settings: Settings, name: str, catalog: Catalog) -> Resolved:
    """Return model and profile of an additional service; raises like ``resolve``."""
    service = settings.service_settings(name)
    try:
        resolved = _resolve_if_fits(service, catalog)
    except SparkError as error:
        raise PlanError(_prefixed(f"services.{name}", error.problems)) from error
    if resolved is None:
        model, profile = model_and_profile(service, catalog)
        configured = settings.services[name].memory_bytes
        needed = configured + missing_bytes(model, profile, service)
        # Round up to hundredths, because the engine's memory fraction has two decimals.
        hundredths = -(-needed * 100 // service.memory.total_bytes)
        required_gib = math.ceil(hundredths * service.memory.total_bytes / 100 / GIB * 10) / 10
        message = (
            f"{model.name} with {profile.name} needs {gib(needed)} "
            f"for one request of {context_tokens(model, profile):,} tokens, "
            f"but memory_gib is {gib(configured)}"
        )
        fix = f"set memory_gib to {required_gib}, or lower engine.max_context_tokens"
        raise PlanError.single(f"services.{name}", message, fix)
    return resolved


def plan_problems(
    settings: Settings, catalog: Catalog, engines: Collection[str] | None = None
) -> list[Problem]:
    """Return why these settings cannot be planned; works without a lock.

    ``engines`` are the versions that the plugin supports; ``None`` skips the check of images.
    """
    problems = _problems(lambda: resolve(settings, catalog), settings, engines)
    problems += rails.role_problems(settings, catalog)
    for name in settings.services:
        service = functools.partial(resolve_service, settings, name, catalog)
        problems += _problems(service, settings, engines)
    for entry in settings.ready_models:
        ready = settings.with_model(entry)
        more = _problems(functools.partial(resolve, ready, catalog), ready, engines)
        problems += _prefixed(f"keep_ready {entry.model} with {entry.profile}", more)
    return problems


def _prefixed(where: str, problems: Iterable[Problem]) -> list[Problem]:
    return [Problem(f"{where}: {p.where}", p.what, p.fix) for p in problems]


def model_and_profile(settings: Settings, catalog: Catalog) -> tuple[Model, Profile]:
    profile = catalog.profile(settings.profile, settings.model)
    return catalog.model(settings.model), effective_profile(profile, settings)


def _resolve_if_fits(settings: Settings, catalog: Catalog) -> Resolved | None:
    """Return the checked model and profile, or ``None`` if they do not fit in memory."""
    model, profile = model_and_profile(settings, catalog)
    reject_unbuildable_checkpoint(model, profile, settings)
    if problems := rails.model_profile_problems(model, profile, settings, catalog.engines):
        raise PlanError(problems)
    if missing_bytes(model, profile, settings) > 0:
        return None
    memory = plan_memory(model, profile, settings)
    facts = rails.release_facts(model, profile, memory, settings)
    warnings = rails.apply_rails(catalog.rails, facts, settings.override_rails)
    notes = catalog.notes(model.name, profile.name)
    return Resolved(model, profile, settings, memory, (*notes, *warnings))


def can_serve(settings: Settings, catalog: Catalog) -> bool:
    try:
        return _resolve_if_fits(settings, catalog) is not None
    except SparkError:
        return False


def _problems(
    resolve_one: Callable[[], Resolved], settings: Settings, engines: Collection[str] | None
) -> list[Problem]:
    try:
        resolved = resolve_one()
    except SparkError as error:
        return list(error.problems)
    if engines is None:
        return []
    return list(rails.engine_problems(resolved.model, resolved.profile, settings, engines))


# Suggestions if a model and profile do not fit. Each is checked like a plan, with guard rails.


@dataclass(frozen=True, slots=True, eq=False)
class Adjustment:
    """A setting that a user can change; each later value leaves the engine more memory."""

    setting: str  # changed at most once per suggestion
    advice: str  # with {} for the value
    values: Sequence[Any]
    change: Callable[[Settings, Any], Settings]


def _memory_error(
    model: Model, profile: Profile, settings: Settings, catalog: Catalog, fits: Fits
) -> PlanError:
    """Return the error with the missing memory and the three cheapest suggestions.

    ``fits`` returns whether changed settings could be planned.
    """
    weights, drafter = loaded_bytes(model, profile, settings.ranks)
    hosts, on_each = "one host", ""
    if settings.ranks > 1:
        hosts, on_each = f"{settings.ranks} hosts", " on each"
    missing = gib(missing_bytes(model, profile, settings))
    message = (
        f"does not fit on {hosts}: {missing} too large{on_each} "
        f"(weights {gib(weights)}, drafter {gib(drafter)}, "
        f"runtime {gib(runtime_bytes(model, profile))}, "
        f"KV cache for one request of {context_tokens(model, profile):,} tokens; "
        f"{gib(settings.reserved_bytes)} of {gib(settings.memory.total_bytes)} are reserved)"
    )
    adjust = functools.partial(_adjustments, model, profile, settings, catalog)
    usual = _suggestions(adjust([_USUAL_FRACTION]), settings, fits)
    changes = usual or _suggestions(adjust(_all_fractions(catalog)), settings, fits)
    smaller = _smaller_model(model, profile, settings, catalog, fits)
    fix = "; or ".join([*changes, *smaller][:_MAX_SUGGESTIONS])
    if not changes:
        fix = (
            f"no setting helps, because the weights alone are {gib(weights)}: "
            f"{fix or 'choose a smaller model'}"
        )
    if not usual and (count := _hosts_needed(settings, fits)):
        freezes = f"freezes with engine.memory_fraction above {_SAFE_FRACTION}"
        risk = f"; users report {freezes}" if changes else ""
        fix += f", or serve {model.name} on {count} hosts together (cluster.hosts){risk}"
    return PlanError.single(f"model {model.name} with profile {profile.name}", message, fix)


def _hosts_needed(settings: Settings, fits: Fits) -> int | None:
    for count in range(settings.ranks + 1, _MAX_HOSTS + 1):
        cluster = replace(settings.cluster, hosts=tuple(f"host-{n}" for n in range(count)))
        if fits(replace(settings, cluster=cluster)):
            return count
    return None


def _suggestions(adjustments: Sequence[Adjustment], settings: Settings, fits: Fits) -> list[str]:
    """Return up to three suggestions, single changes first."""
    suggestions: dict[tuple[Adjustment, ...], str] = {}
    sizes = range(1, len({adjustment.setting for adjustment in adjustments}) + 1)
    for chosen in (group for size in sizes for group in itertools.combinations(adjustments, size)):
        if len(suggestions) == _MAX_SUGGESTIONS:
            break
        has_repeats = len({adjustment.setting for adjustment in chosen}) < len(chosen)
        if has_repeats or any(set(earlier) <= set(chosen) for earlier in suggestions):
            continue
        if values := _smallest_changes(chosen, settings, fits):
            advice = [a.advice.format(value) for a, value in zip(chosen, values, strict=True)]
            suggestions[chosen] = " and ".join(advice)
    return list(suggestions.values())


def _smallest_changes(chosen: Sequence[Adjustment], settings: Settings, fits: Fits) -> list[Any]:
    """Return the first value of each adjustment with which the deployment fits; [] if none fits."""
    values = [adjustment.values[-1] for adjustment in chosen]

    def fits_with(index: int, value: Any) -> bool:
        changed = settings
        for other, adjustment in enumerate(chosen):
            changed = adjustment.change(changed, value if other == index else values[other])
        return fits(changed)

    if not fits_with(0, values[0]):
        return []
    for index, adjustment in enumerate(chosen):
        fits_at = functools.partial(fits_with, index)
        last = len(adjustment.values) - 1  # known to fit
        smallest = bisect.bisect_left(adjustment.values, True, hi=last, key=fits_at)
        values[index] = adjustment.values[smallest]
    return values


def _smaller_model(
    model: Model, profile: Profile, settings: Settings, catalog: Catalog, fits: Fits
) -> list[str]:
    """Suggest the largest other model that fits and supports the same context."""
    if not isinstance(model, HybridModel):
        return []
    context = context_tokens(model, profile)
    fitting = [
        other
        for other in catalog.models.values()
        if isinstance(other, HybridModel)
        and other.name != model.name
        and other.architecture.max_context_tokens >= context
        and fits(replace(settings, model=other.name))
    ]
    largest = max(fitting, key=lambda m: weight_sizes(m.architecture).tree_bytes, default=None)
    return [f"choose model {largest.name}"] if largest else []


def _adjustments(
    model: Model,
    profile: Profile,
    settings: Settings,
    catalog: Catalog,
    fractions: Sequence[float],
) -> list[Adjustment]:
    """Return the applicable changes, the cheapest for the user first."""
    higher = [value for value in fractions if value > profile.limits.memory_fraction]
    reserve_gib = math.ceil(settings.memory.reserve_bytes / GIB)
    reserves = range(reserve_gib - 1, _MIN_RESERVE_GIB - 1, -1)
    services_gib = min(_service_memory_gib(settings), settings.memory.total_bytes // GIB + 1)
    totals = range(services_gib - 1, len(settings.services) - 1, -1) if settings.services else ()
    context = context_tokens(model, profile)
    halves = [context >> n for n in range(1, (context // _MIN_CONTEXT_TOKENS).bit_length())]
    no_drafts = [0] if profile.speculation else []
    no_vision = [False] if profile.vision else []
    no_cache_size = [None] if settings.engine.kv_cache_gib is not None else []
    names = ", ".join(f"services.{name}.memory_gib" for name in settings.services)
    engine = functools.partial(_setter, "engine")
    adjustments = [
        Adjustment("vision", "set engine.vision to false", no_vision, engine("vision")),
        Adjustment("cache", "drop engine.kv_cache_gib", no_cache_size, engine("kv_cache_gib")),
        Adjustment(
            "fraction", "raise engine.memory_fraction to {}", higher, engine("memory_fraction")
        ),
        Adjustment(
            "reserve", "lower memory.reserve_gib to {}", reserves, _setter("memory", "reserve_gib")
        ),
        Adjustment("services", f"lower {names} to {{}} together", totals, _scale_service_memory),
        Adjustment(
            "context", "set engine.max_context_tokens to {}", halves, engine("max_context_tokens")
        ),
        Adjustment("drafts", "set engine.drafts to {}", no_drafts, engine("drafts")),
        *(
            Adjustment(
                "profile", "choose profile {}", [name], lambda s, name: replace(s, profile=name)
            )
            for name in _similar_profiles(profile, model, catalog)
        ),
    ]
    return [adjustment for adjustment in adjustments if adjustment.values]


def _all_fractions(catalog: Catalog) -> list[float]:
    """Return the memory fractions 0.01, 0.02, ... that no guard rail rejects by themselves."""
    limits = (
        rail.applies["memory_fraction"].get("above", 1.0)
        for rail in catalog.rails
        if rail.effect == "refuse" and [*rail.applies] == ["memory_fraction"]
    )
    highest = min(limits, default=_USUAL_FRACTION)
    return [number / 100 for number in range(1, 101) if number / 100 <= highest]


def _similar_profiles(profile: Profile, model: Model, catalog: Catalog) -> list[str]:
    def distance(other: Profile) -> tuple[bool, bool]:
        drafts_differ = (other.speculation is None) != (profile.speculation is None)
        return drafts_differ, other.plugin != profile.plugin

    profiles = sorted(catalog.profiles.items())
    others = [other for (_, served), other in profiles if served == model.name]
    return [other.name for other in sorted(others, key=distance) if other.name != profile.name]


def _setter(section: str, name: str) -> Callable[[Settings, Any], Settings]:
    return lambda settings, value: replace(
        settings, **{section: replace(getattr(settings, section), **{name: value})}
    )


def _service_memory_gib(settings: Settings) -> int:
    return sum(service.memory_bytes for service in settings.services.values()) // GIB


def _scale_service_memory(settings: Settings, total_gib: int) -> Settings:
    factor = total_gib / max(1, _service_memory_gib(settings))
    services = {
        name: replace(service, memory_gib=service.memory_gib * factor)
        for name, service in settings.services.items()
    }
    return replace(settings, services=services)
