"""Names of the settings become a model, a profile and what they need: one way for everybody.

``plan``, the check of an inventory and the search for what would fit all come through here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from spark_deploy.catalog.model import Model
from spark_deploy.catalog.profile import Profile
from spark_deploy.catalog.types import Catalog
from spark_deploy.errors import PlanError, Problem, SparkError
from spark_deploy.facts.network.fabric import Ports
from spark_deploy.lockfile.types import Lock
from spark_deploy.planning.budget.memory import GIB, context_tokens, gib, missing_bytes, plan_memory
from spark_deploy.planning.effective import effective_profile
from spark_deploy.planning.engine.facts import facts_of
from spark_deploy.planning.fit import refusal
from spark_deploy.planning.guard_rails import apply_rails
from spark_deploy.planning.limits import (
    architecture_problems,
    engine_problems,
    limit_problems,
    parser_problems,
    role_problems,
    spread_problems,
)
from spark_deploy.planning.machine import PayloadIdentity
from spark_deploy.planning.types import MemoryPlan
from spark_deploy.planning.work.checkpoint import refuse_impossible_trees
from spark_deploy.settings.types import Settings


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
