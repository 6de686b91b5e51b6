"""Say before any connection whether model, profile and host fit: needs no lock."""

from __future__ import annotations

from spark_deploy.catalog.load import load_guard_rails, load_model, load_profile
from spark_deploy.errors import Problem, SparkError
from spark_deploy.planning.budget.memory import missing_bytes, plan_memory
from spark_deploy.planning.effective import effective_profile
from spark_deploy.planning.fit import refusal
from spark_deploy.planning.guard_rails import apply_rails, facts_of
from spark_deploy.planning.work.checkpoint import refuse_impossible_trees
from spark_deploy.settings.types import Settings


def check_pair(settings: Settings) -> list[Problem]:
    """Return why these settings can never be planned; empty when they can."""
    problems = _check(settings)
    for pair in settings.ready_pairs:
        for problem in _check(settings.of_pair(pair)):
            where = f"keep_ready {pair.model} with {pair.profile}: {problem.where}"
            problems.append(Problem(where, problem.what, problem.fix))
    return problems


def _check(settings: Settings) -> list[Problem]:
    try:
        model = load_model(settings.model)
        profile = effective_profile(load_profile(settings.profile, settings.model), settings)
        refuse_impossible_trees(model, profile, settings)
        if missing_bytes(model, profile, settings) > 0:
            return list(refusal(model, profile, settings).problems)
        memory = plan_memory(model, profile, settings)
        facts = facts_of(model, profile, memory, settings)
        apply_rails(load_guard_rails(), facts)
    except SparkError as error:
        return list(error.problems)
    return []
