"""Resolve model and profile of the settings, and check that they can be served.

The plan, the inventory check and the search for fitting settings all use this module.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spark_deploy.config.catalog.model import Architecture, Model, PlainModel
from spark_deploy.config.catalog.profile import Profile, Speculation
from spark_deploy.config.catalog.types import CALLED, Catalog, Engines, version_of
from spark_deploy.config.errors import PlanError, Problem, SparkError
from spark_deploy.config.schema_errors import closest
from spark_deploy.config.settings.engine_options import KvCache, Limits
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.types import Lock
from spark_deploy.plan.artifacts import refuse_impossible_trees
from spark_deploy.plan.engine_arguments import brings_own_class, stretches_context
from spark_deploy.plan.fit import refusal
from spark_deploy.plan.guard_rails import apply_rails, facts_of
from spark_deploy.plan.kv_cache import context_tokens, native_context_tokens
from spark_deploy.plan.memory import GIB, gib, missing_bytes, plan_memory
from spark_deploy.plan.types import MemoryPlan, PayloadIdentity, Ports

_Part = TypeVar("_Part", Profile, Limits, KvCache)
# For drafts that only the settings enable: a drafter without weights is accepted almost never.
_ACCEPTANCE_FLOOR = 0.5


def effective_profile(profile: Profile, settings: Settings) -> Profile:
    """Return the profile with the host's ``engine`` and ``checkpoint`` settings applied."""
    engine = {f.name: getattr(settings.engine, f.name) for f in dataclasses.fields(settings.engine)}
    if settings.checkpoint.prebuilt and profile.shared_experts == "fp8-donor":
        profile = dataclasses.replace(profile, shared_experts="fp8-base")
    if settings.engine.drafts is not None:
        profile = with_drafts(profile, settings.engine.drafts)
    return dataclasses.replace(
        _apply(profile, engine),
        limits=_apply(profile.limits, engine),
        kv_cache=_apply(profile.kv_cache, {"size_gib": settings.engine.kv_cache_gib}),
        layout=settings.checkpoint.layout or profile.layout,
    )


def with_drafts(profile: Profile, tokens: int) -> Profile:
    """Return the profile with this number of drafts, and the matching acceptance check."""
    if not tokens:
        return dataclasses.replace(profile, speculation=None)
    drafts = profile.speculation or Speculation(method="mtp", tokens=tokens)
    floor = profile.check.acceptance_floor or _ACCEPTANCE_FLOOR
    return dataclasses.replace(
        profile,
        speculation=dataclasses.replace(drafts, tokens=tokens),
        check=dataclasses.replace(profile.check, acceptance_floor=floor),
    )


def _apply(part: _Part, chosen: Mapping[str, Any]) -> _Part:
    """Return a part with chosen values for its fields; mappings are merged, ``None`` keeps."""
    changed: dict[str, Any] = {}
    for item in dataclasses.fields(part):
        value, old = chosen.get(item.name), getattr(part, item.name)
        changed[item.name] = {**old, **value} if isinstance(value, dict) else value
    return dataclasses.replace(part, **{k: v for k, v in changed.items() if v is not None})


def limit_problems(model: Model, profile: Profile) -> Iterator[Problem]:
    if isinstance(model, PlainModel):
        knows_context = model.anatomy is not None and model.anatomy.context_tokens is not None
        can_draft = model.anatomy is None or model.anatomy.drafter_bytes > 0
    else:
        knows_context, can_draft = True, model.architecture.mtp_layers > 0
    most, context = native_context_tokens(model), context_tokens(model, profile)
    if context > most and knows_context and not stretches_context(profile):
        what = f"{context:,} tokens exceed the context of {model.name} ({most:,})"
        fix = f"set engine.max_context_tokens to {most} or less, or remove it"
        yield Problem("engine.max_context_tokens", what, fix)
    if profile.speculation and profile.speculation.by_own_layers and not can_draft:
        what = f"{model.name} has no MTP layer to draft with"
        fix = "set engine.drafts: 0, or choose a profile without drafts"
        yield Problem(f"profile {profile.name}", what, fix)
    if model.adapters and profile.speculation:
        what = f"drafts are unverified with adapters, and {model.name} has adapters"
        yield Problem(f"profile {profile.name}", what, "set engine.drafts: 0")
    limits = profile.limits
    if limits.max_sequences > limits.max_batched_tokens:
        what = f"{limits.max_sequences} exceeds max_batched_tokens ({limits.max_batched_tokens})"
        fix = f"set engine.max_sequences to {limits.max_batched_tokens} or less"
        yield Problem("engine.max_sequences", what, fix)


def architecture_problems(
    model: Model, profile: Profile, settings: Settings, engines: Engines
) -> Iterator[Problem]:
    """Yield a problem if the engine lists no class for the repository's architecture.

    Without a version in the image's tag the engine itself reports it, after the download.
    """
    if not isinstance(model, PlainModel) or model.anatomy is None:
        return
    image, named = settings.images.get(model.image.role, ""), model.anatomy.architecture
    version, engine = engines.of_image(image)
    if engine is None or not named or brings_own_class(profile) or engine.lists(named):
        return
    others = [name for name, engine in engines.engines.items() if engine.lists(named)]
    fix = (
        f"name an image of {CALLED} {', '.join(others)}" if others else "choose another repository"
    )
    what = f"{CALLED} {version} does not support its architecture {named}"
    yield Problem(f"model {model.name}", what, f"{fix}, or set engine.options.model-impl")


def parser_problems(model: Model, settings: Settings, engines: Engines) -> Iterator[Problem]:
    version, engine = engines.of_image(settings.images.get(model.image.role, ""))
    if engine is None:
        return
    named = {"tool_call": model.parsers.tool_call, "reasoning": model.parsers.reasoning}
    for kind, parser in named.items():
        listed = getattr(engine, kind)
        if parser is not None and parser not in listed:
            guess = closest(parser, listed)
            fix = f"did you mean {guess}?" if guess else "remove it: the text stays unparsed"
            what = f"{parser} is not a parser of {CALLED} {version}"
            yield Problem(f"model {model.name}: parsers.{kind}", what, fix)


def role_problems(settings: Settings, catalog: Catalog) -> Iterator[Problem]:
    """Yield image roles that no model uses; a misspelt role would leave the default active."""
    known = sorted({"gpu_check", *(model.image.role for model in catalog.models.values())})
    for role in sorted(set(settings.images).difference(known, Settings().images)):
        guess = closest(role, known)
        fix = f"did you mean images.{guess}?" if guess else f"known: {', '.join(known)}"
        yield Problem(f"images.{role}", "no model uses this image role", fix)


def engine_problems(
    model: Model, profile: Profile, settings: Settings, engines: Collection[str]
) -> Iterator[Problem]:
    """Yield a problem if the plugin does not support the engine version in the image's tag.

    Images without a version are checked while the plugin layer is built.
    """
    image = settings.images.get(model.image.role, "")
    version = version_of(image)
    if version and version not in engines and profile.plugin and model.image.plugin:
        known = ", ".join(sorted(engines))
        what = f"{image} is engine {version}; the plugin supports {known}"
        fix = "use an image of a supported version, or a profile without the plugin"
        yield Problem(f"images.{model.image.role}", what, fix)


_MOST_RANKS = 16
# Values per INT4 or FP8 scale: each rank must get whole groups.
_GROUP = 128


def spread_problems(model: Model, profile: Profile, settings: Settings) -> Iterator[Problem]:
    ranks = settings.ranks
    if isinstance(model, PlainModel):
        if ranks > 1:
            what = f"{model.name} is served as published, which supports one host only"
            yield Problem("cluster.hosts", what, "serve it on each host separately")
        return
    shape = model.architecture
    group = _GROUP if profile.engine_mode == "native" else 1
    if ranks == 1 or not (uneven := list(_uneven(shape, ranks, group))):
        return
    fitting = [
        str(n)
        for n in range(2, _MOST_RANKS + 1)
        # The guard rail experts-of-one-group refuses a single group per rank.
        if not list(_uneven(shape, n, group)) and shape.expert_width // n > group
    ]
    fix = f"use {' or '.join(fitting)} hosts" if fitting else "serve it on each host separately"
    what = f"{model.name} cannot be split into {ranks} equal parts: {', '.join(uneven)}"
    yield Problem("cluster.hosts", what, fix)


def _uneven(shape: Architecture, ranks: int, group: int) -> Iterator[str]:
    """Name the dimensions that cannot be split into ``ranks`` parts of whole groups."""
    if shape.kv_heads % ranks and ranks % shape.kv_heads:  # fewer heads than ranks are repeated
        yield f"{shape.kv_heads} KV heads"
    heads = {"attention heads": shape.attention_heads}
    if (net := shape.linear_attention) is not None:
        heads |= {"key heads of linear attention": net.key_heads}
        heads |= {"value heads of linear attention": net.value_heads}
    yield from (f"{count} {name}" for name, count in heads.items() if count % ranks)
    widths = {"routed": shape.expert_width, "shared": shape.shared_expert_width}
    for name, width in widths.items():
        if width % (ranks * group):
            yield f"{name} experts {width} wide in groups of {group}"


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
    """A pair that fits on this host and that no rule refuses."""

    model: Model
    profile: Profile  # with the host's settings applied
    settings: Settings  # of this pair
    memory: MemoryPlan
    warnings: tuple[str, ...]


def resolve(settings: Settings, catalog: Catalog) -> Resolved:
    """Return the pair of the settings.

    Raises:
        SparkError: every reason why it cannot be served, and what to change.
    """
    resolved = _fitting(settings, catalog)
    if resolved is None:
        model, profile = pair_of(settings, catalog)
        raise refusal(model, profile, settings, catalog, lambda other: _fits(other, catalog))
    return resolved


def resolve_service(settings: Settings, name: str, catalog: Catalog) -> Resolved:
    """Return the pair of an additional service; like :func:`resolve`."""
    own = settings.of_service(name)
    try:
        resolved = _fitting(own, catalog)
    except SparkError as error:
        raise PlanError(_within(f"services.{name}", error.problems)) from error
    if resolved is None:
        model, profile = pair_of(own, catalog)
        given = settings.services[name].memory_bytes
        needed = given + missing_bytes(model, profile, own)
        # The engine takes whole hundredths of the memory.
        hundredths = -(-needed * 100 // own.memory.total_bytes)
        enough = math.ceil(hundredths * own.memory.total_bytes / 100 / GIB * 10) / 10
        what = (
            f"{model.name} with {profile.name} and one request of "
            f"{context_tokens(model, profile):,} tokens need {gib(needed)}, memory_gib is "
            f"{gib(given)}"
        )
        fix = f"set memory_gib to {enough}, or lower engine.max_context_tokens"
        raise PlanError.one(f"services.{name}", what, fix)
    return resolved


def problems_of(
    settings: Settings, catalog: Catalog, engines: Collection[str] | None = None
) -> list[Problem]:
    """Return why these settings cannot be planned; works without a lock.

    ``engines`` are the versions that the plugin supports; ``None`` skips the check of images.
    """
    problems = _problems(lambda: resolve(settings, catalog), settings, engines)
    problems += role_problems(settings, catalog)
    for name in settings.services:
        service = functools.partial(resolve_service, settings, name, catalog)
        problems += _problems(service, settings, engines)
    for pair in settings.ready_pairs:
        own = settings.of_pair(pair)
        more = _problems(functools.partial(resolve, own, catalog), own, engines)
        problems += _within(f"keep_ready {pair.model} with {pair.profile}", more)
    return problems


def _within(where: str, problems: Iterable[Problem]) -> list[Problem]:
    return [Problem(f"{where}: {p.where}", p.what, p.fix) for p in problems]


def pair_of(settings: Settings, catalog: Catalog) -> tuple[Model, Profile]:
    """Return model and effective profile, whether they fit or not."""
    profile = catalog.profile(settings.profile, settings.model)
    return catalog.model(settings.model), effective_profile(profile, settings)


def _fitting(settings: Settings, catalog: Catalog) -> Resolved | None:
    """Load, check, compute memory and apply guard rails; ``None`` if memory does not suffice."""
    model, profile = pair_of(settings, catalog)
    refuse_impossible_trees(model, profile, settings)
    problems = [*limit_problems(model, profile), *spread_problems(model, profile, settings)]
    problems += architecture_problems(model, profile, settings, catalog.engines)
    problems += parser_problems(model, settings, catalog.engines)
    if problems:
        raise PlanError(problems)
    if missing_bytes(model, profile, settings) > 0:
        return None
    memory = plan_memory(model, profile, settings)
    facts = facts_of(model, profile, memory, settings)
    warnings = apply_rails(catalog.rails, facts, settings.override_rails)
    notes = catalog.notes(model.name, profile.name)
    return Resolved(model, profile, settings, memory, (*notes, *warnings))


def _fits(settings: Settings, catalog: Catalog) -> bool:
    try:
        return _fitting(settings, catalog) is not None
    except SparkError:
        return False


def _problems(
    find: Callable[[], Resolved], settings: Settings, engines: Collection[str] | None
) -> list[Problem]:
    try:
        resolved = find()
    except SparkError as error:
        return list(error.problems)
    if engines is None:
        return []
    return list(engine_problems(resolved.model, resolved.profile, settings, engines))
