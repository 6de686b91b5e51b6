"""Compare a planned release with the rules of ``catalog/guard_rails.yml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spark_deploy.config.catalog.guard_rails import GuardRail, all_hold
from spark_deploy.config.documents.schema_check import closest
from spark_deploy.config.errors import PlanError, Problem


def apply_rails(
    rails: Sequence[GuardRail],
    facts: Mapping[str, Any],
    overridden: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Return the warnings, or raise one error with every refusal.

    Args:
        rails: the rules.
        facts: of the planned release.
        overridden: names of refusing rails that the owner of the host takes on, and why.
    """
    _refuse_unknown(rails, facts)
    hits = [rail for rail in rails if all_hold(rail.applies, facts)]
    refused = list(_no_overrides(rails, overridden))
    warnings = []
    for rail in hits:
        if rail.effect == "warn":
            warnings.append(f"{rail.rule}: {rail.reason}; {rail.fix} ({rail.source})")
        elif rail.rule in overridden:
            why = overridden[rail.rule]
            warnings.append(f"{rail.rule} is overridden ({why}): {rail.reason} ({rail.source})")
        else:
            fix = f"{rail.fix}, or take it on: override_rails: {{{rail.rule}: WHY}}"
            where = f"model {facts['model']} with profile {facts['profile']}"
            what = f"refused by guard rail {rail.rule}: {rail.reason} ({rail.source})"
            refused.append(Problem(where, what, fix if rail.may_be_overridden else rail.fix))
    if refused:
        raise PlanError(refused)
    return tuple(warnings)


def _no_overrides(rails: Sequence[GuardRail], overridden: Mapping[str, str]) -> Iterator[Problem]:
    """Yield each override of a rail that is not there, or that nobody may override."""
    known = [rail.rule for rail in rails if rail.may_be_overridden]
    for rule in sorted(set(overridden).difference(known)):
        there = any(rail.rule == rule for rail in rails)
        what = "is no rail that may be overridden" if there else "is no guard rail"
        guess = closest(rule, known)
        fix = f"did you mean {guess}?" if guess else f"these may: {', '.join(known)}"
        yield Problem(f"override_rails: {rule}", what, fix)


def _refuse_unknown(rails: Sequence[GuardRail], facts: Mapping[str, Any]) -> None:
    """Refuse rails about facts that nobody states: they would never hold."""
    problems = []
    for rail in rails:
        others = (one["below_fact"] for one in rail.applies.values() if "below_fact" in one)
        for name in (*rail.applies, *others):
            if name not in facts:
                guess = closest(name, list(facts))
                fix = f"did you mean {guess}?" if guess else f"known: {', '.join(sorted(facts))}"
                where = f"catalog/guard_rails.yml: {rail.rule}: {name}"
                problems.append(Problem(where, "is no fact of a release", fix))
    if problems:
        raise PlanError(problems)
