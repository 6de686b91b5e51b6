"""Names of the settings become a model, a profile and what they need: one way for everybody.

``plan``, the check of an inventory and the search for what would fit all come through here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spark_deploy.config.catalog.companions import Speculation
from spark_deploy.config.catalog.model import Architecture, Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.catalog.types import CALLED, Catalog, Engines, version_of
from spark_deploy.config.errors import PlanError, Problem, SparkError
from spark_deploy.config.schema_errors import closest
from spark_deploy.config.settings.engine_arguments import KvCache, Limits
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.types import Lock
from spark_deploy.plan.artifacts import refuse_impossible_trees
from spark_deploy.plan.engine_arguments import (
    BRING_OWN_CLASS,
    brings_own_class,
    stretches_context,
)
from spark_deploy.plan.fit import refusal
from spark_deploy.plan.guard_rails import apply_rails, facts_of
from spark_deploy.plan.kv_cache import context_tokens, native_context_tokens
from spark_deploy.plan.memory import GIB, gib, missing_bytes, plan_memory
from spark_deploy.plan.types import MemoryPlan, PayloadIdentity, Ports

_Part = TypeVar("_Part", Profile, Limits, KvCache)
# Of a host that drafts although its profile does not: a drafter without weights gets almost none.
_ACCEPTANCE_FLOOR = 0.5


def effective_profile(profile: Profile, settings: Settings) -> Profile:
    """Return the profile with the ``engine`` and ``checkpoint`` settings of the host put in."""
    engine = {
        field.name: getattr(settings.engine, field.name)
        for field in dataclasses.fields(settings.engine)
    }
    if settings.checkpoint.prebuilt and profile.shared_experts == "fp8-donor":
        profile = dataclasses.replace(profile, shared_experts="fp8-base")
    if settings.engine.drafts is not None:
        profile = with_drafts(profile, settings.engine.drafts)
    return dataclasses.replace(
        _put_in(profile, engine),
        limits=_put_in(profile.limits, engine),
        kv_cache=_put_in(profile.kv_cache, {"size_gib": settings.engine.kv_cache_gib}),
        layout=settings.checkpoint.layout or profile.layout,
    )


def with_drafts(profile: Profile, tokens: int) -> Profile:
    """Return the profile with so many drafts, and what its proof then demands."""
    if not tokens:
        return dataclasses.replace(profile, speculation=None)
    drafts = profile.speculation or Speculation(method="mtp", tokens=tokens)
    floor = profile.check.acceptance_floor or _ACCEPTANCE_FLOOR
    return dataclasses.replace(
        profile,
        speculation=dataclasses.replace(drafts, tokens=tokens),
        check=dataclasses.replace(profile.check, acceptance_floor=floor),
    )


def _put_in(part: _Part, chosen: Mapping[str, Any]) -> _Part:
    """Return a part with what is chosen for fields of its own; mappings are merged, null keeps."""
    changed: dict[str, Any] = {}
    for item in dataclasses.fields(part):
        value, kept = chosen.get(item.name), getattr(part, item.name)
        changed[item.name] = {**kept, **value} if isinstance(value, dict) else value
    return dataclasses.replace(part, **{k: v for k, v in changed.items() if v is not None})


def limit_problems(model: Model, profile: Profile) -> Iterator[Problem]:
    """Yield what of the effective profile the model or the engine refuses at its start."""
    most, wanted = native_context_tokens(model), context_tokens(model, profile)
    if wanted > most and _knows_context(model) and not stretches_context(profile):
        what = f"{wanted:,} tokens are more than {model.name} was made for ({most:,})"
        fix = f"set engine.max_context_tokens to {most} or less, or leave it out"
        yield Problem("engine.max_context_tokens", what, fix)
    if profile.speculation and profile.speculation.by_own_layers and not _can_draft(model):
        what = f"{model.name} has no MTP layer to draft with"
        fix = "set engine.drafts: 0, or choose a profile without drafts"
        yield Problem(f"profile {profile.name}", what, fix)
    if model.adapters and profile.speculation:
        what = f"{model.name} has adapters, and nobody proved that drafts fit their answers"
        yield Problem(f"profile {profile.name}", what, "set engine.drafts: 0")
    limits = profile.limits
    if limits.max_sequences > limits.max_batched_tokens:
        what = (
            f"{limits.max_sequences} are more than the {limits.max_batched_tokens} tokens of one "
            f"step of profile {profile.name}"
        )
        fix = f"set engine.max_sequences to {limits.max_batched_tokens} or less"
        yield Problem("engine.max_sequences", what, fix)


def architecture_problems(
    model: Model, profile: Profile, settings: Settings, engines: Engines
) -> Iterator[Problem]:
    """Yield why the engine cannot load a repository: it has no class of that name.

    Of an image whose tag tells no version nobody knows; it says so itself, after the download.
    """
    if not isinstance(model, PlainModel) or model.anatomy is None:
        return
    image, named = settings.images.get(model.image.role, ""), model.anatomy.architecture
    version, engine = engines.of_image(image)
    if engine is None or not named or brings_own_class(profile) or engine.lists(named):
        return
    others = [one for one, engine in engines.engines.items() if engine.lists(named)]
    fix = (
        f"name an image of {CALLED} {', '.join(others)}" if others else "choose another repository"
    )
    what = f"its architecture {named} is not one that {CALLED} {version} lists"
    yield Problem(f"model {model.name}", what, f"{fix}, or {BRING_OWN_CLASS}")


def parser_problems(model: Model, settings: Settings, engines: Engines) -> Iterator[Problem]:
    """Yield parsers that the engine would refuse once everything is downloaded."""
    version, engine = engines.of_image(settings.images.get(model.image.role, ""))
    if engine is None:
        return
    named = {"tool_call": model.parsers.tool_call, "reasoning": model.parsers.reasoning}
    for kind, parser in named.items():
        listed = getattr(engine, kind)
        if parser is not None and parser not in listed:
            guess = closest(parser, listed)
            fix = f"did you mean {guess}? Without" if guess else "leave it out: without"
            what = f"{parser} is no parser of {CALLED} {version}"
            yield Problem(f"model {model.name}: parsers.{kind}", what, f"{fix} one it stays text")


def _can_draft(model: Model) -> bool:
    """Whether it has layers of its own to draft with, as far as anybody knows."""
    if isinstance(model, PlainModel):
        return model.anatomy is None or model.anatomy.drafter_bytes > 0
    return model.architecture.mtp_layers > 0


def _knows_context(model: Model) -> bool:
    """Whether the longest context of a model is known, not taken for lack of a better one."""
    if isinstance(model, PlainModel):
        return model.anatomy is not None and model.anatomy.context_tokens is not None
    return True


def role_problems(settings: Settings, catalog: Catalog) -> Iterator[Problem]:
    """Yield images that nothing asks for: a misspelt role leaves the default in its place."""
    model = catalog.models.get(settings.model)
    told = {*Settings().images, *([model.image.role] if model else [])}
    for role in (role for role in settings.images if role not in told):
        known = sorted({"gpu_check", *(model.image.role for model in catalog.models.values())})
        if role not in known:
            guess = closest(role, known)
            fix = f"did you mean images.{guess}?" if guess else f"known: {', '.join(known)}"
            yield Problem(f"images.{role}", "no model has its engine under this name", fix)


def engine_problems(
    model: Model, profile: Profile, settings: Settings, engines: Collection[str]
) -> Iterator[Problem]:
    """Yield why our plugin cannot be laid on the image, as far as its tag tells a version.

    Other images are judged by the plugin's own check while its layer is built.
    """
    image = settings.images.get(model.image.role, "")
    version = version_of(image)
    if version and version not in engines and profile.plugin and model.image.plugin:
        known = ", ".join(sorted(engines))
        what = f"{image} is engine {version}, which the plugin does not know (known: {known})"
        fix = "name an image of one of these, or choose a profile without the plugin"
        yield Problem(f"images.{model.image.role}", what, fix)


_MOST_RANKS = 16
# INT4 and FP8 scales belong to so many values: a part of a matrix ends where one of them does.
_GROUP = 128


def spread_problems(model: Model, profile: Profile, settings: Settings) -> Iterator[Problem]:
    """Yield why the model cannot be spread over the hosts of the cluster, and what could."""
    ranks = settings.ranks
    if isinstance(model, PlainModel):
        if ranks > 1:
            what = f"{model.name} is served as published, which is by one host here"
            yield Problem("cluster.hosts", what, "let each host serve by itself")
        return
    shape = model.architecture
    group = _GROUP if profile.engine_mode == "native" else 1
    if ranks == 1 or not (uneven := list(_uneven(shape, ranks, group))):
        return
    fitting = [
        str(n)
        for n in range(2, _MOST_RANKS + 1)
        # One group on a rank is what the guard rail experts-of-one-group refuses.
        if not list(_uneven(shape, n, group)) and shape.expert_width // n > group
    ]
    fix = f"name {' or '.join(fitting)} hosts" if fitting else "let each host serve by itself"
    what = f"{model.name} cannot be cut into {ranks} equal parts: {', '.join(uneven)}"
    yield Problem("cluster.hosts", what, fix)


def _uneven(shape: Architecture, ranks: int, group: int) -> Iterator[str]:
    """Name what cannot be cut into so many parts that end where a group of scales does."""
    if shape.kv_heads % ranks and ranks % shape.kv_heads:  # repeated where they are fewer
        yield f"{shape.kv_heads} heads of keys and values"
    heads = {"attention heads": shape.attention_heads}
    if (net := shape.linear_attention) is not None:
        heads |= {"key heads of linear attention": net.key_heads}
        heads |= {"value heads of linear attention": net.value_heads}
    yield from (f"{count} {what}" for what, count in heads.items() if count % ranks)
    widths = {"routed": shape.expert_width, "shared": shape.shared_expert_width}
    for what, width in widths.items():
        if width % (ranks * group):
            yield f"{what} experts {width} wide in groups of {group}"


@dataclass(frozen=True, slots=True)
class Request:
    """All that a plan is made of, loaded before; nothing else decides anything."""

    host: str
    settings: Settings
    catalog: Catalog
    lock: Lock
    payload: PayloadIdentity
    # What the hosts of its cluster said; without, their addresses are left open.
    fabric: Mapping[str, Ports] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A pair that can be served on this host: nothing refuses it, and it fits."""

    model: Model
    profile: Profile  # with the settings of the host put in
    settings: Settings  # of this pair
    memory: MemoryPlan
    warnings: tuple[str, ...]


def resolve(settings: Settings, catalog: Catalog) -> Resolved:
    """Return the pair that ``settings`` name: loaded, not refused, fitting, within the rails.

    Raises:
        SparkError: with every reason why it cannot be served, and what to change.
    """
    found = _fitting(settings, catalog)
    if found is None:
        model, profile = pair_of(settings, catalog)
        raise refusal(model, profile, settings, catalog, lambda other: _fits(other, catalog))
    return found


def resolve_service(settings: Settings, name: str, catalog: Catalog) -> Resolved:
    """Return the pair of a service beside the main one.

    Raises:
        SparkError: As :func:`resolve`; every line names the service.
    """
    own = settings.of_service(name)
    try:
        found = _fitting(own, catalog)
    except SparkError as error:
        raise PlanError([
            Problem(f"services.{name}: {one.where}", one.what, one.fix) for one in error.problems
        ]) from error  # fmt: skip
    if found is None:
        model, profile = pair_of(own, catalog)
        given = settings.services[name].memory_bytes
        wanted = given + missing_bytes(model, profile, own)
        # The engine gets whole hundredths of the memory.
        hundredths = -(-wanted * 100 // own.memory.total_bytes)
        enough = math.ceil(hundredths * own.memory.total_bytes / 100 / GIB * 10) / 10
        what = (
            f"{model.name} with {profile.name} and one request of "
            f"{context_tokens(model, profile):,} tokens need {gib(wanted)}, memory_gib gives "
            f"{gib(given)}"
        )
        fix = f"set memory_gib to {enough}, or engine.max_context_tokens to less"
        raise PlanError.one(f"services.{name}", what, fix)
    return found


def problems_of(
    settings: Settings, catalog: Catalog, engines: Collection[str] | None = None
) -> list[Problem]:
    """Return why these settings can never be planned; empty when they can. Needs no lock.

    ``engines`` are the versions that the plugin knows; without, images are not judged.
    """
    problems = _problems(lambda: resolve(settings, catalog), settings, engines)
    problems += role_problems(settings, catalog)
    for name in settings.services:
        problems += _problems(
            functools.partial(resolve_service, settings, name, catalog), settings, engines
        )
    for pair in settings.ready_pairs:
        own = settings.of_pair(pair)
        for problem in _problems(functools.partial(resolve, own, catalog), own, engines):
            where = f"keep_ready {pair.model} with {pair.profile}: {problem.where}"
            problems.append(Problem(where, problem.what, problem.fix))
    return problems


def pair_of(settings: Settings, catalog: Catalog) -> tuple[Model, Profile]:
    """Return model and profile as this host would serve them, whether they fit or not."""
    profile = catalog.profile(settings.profile, settings.model)
    return catalog.model(settings.model), effective_profile(profile, settings)


def _fitting(settings: Settings, catalog: Catalog) -> Resolved | None:
    """Load, resolve, refuse, weigh, judge by the rails; ``None`` when memory does not suffice."""
    model, profile = pair_of(settings, catalog)
    refuse_impossible_trees(model, profile, settings)
    beyond = [*limit_problems(model, profile), *spread_problems(model, profile, settings)]
    beyond += architecture_problems(model, profile, settings, catalog.engines)
    beyond += parser_problems(model, settings, catalog.engines)
    if beyond:
        raise PlanError(beyond)
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
        found = find()
    except SparkError as error:
        return list(error.problems)
    if engines is None:
        return []
    return list(engine_problems(found.model, found.profile, settings, engines))
