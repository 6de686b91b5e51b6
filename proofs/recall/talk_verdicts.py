"""Judges of conversations: prefix caching and drafts against an engine with neither.

An answer may be another one only where the model itself doubts: where the right token has a third
of the probability or more and does not come first. Everything else is a fault of the engine. What
the model does not know, with neither, is no fault of one with both: it has to be as wrong.
"""

from __future__ import annotations

from typing import Any

from proofs.recall.judge import (
    CLEAR,
    DOUBT,
    Results,
    Row,
    acceptance,
    acceptance_by_place,
    talk_figures,
)

UNKNOWN = 0.1
"""Share of the questions that the model may answer wrongly with neither cache nor drafts."""


def judge_talks(results: Results, plain_name: str) -> list[Row]:
    """Judge every conversation; those of another seed or cache have an engine of their own."""
    found = []
    for name, result in results.items():
        if "talk" not in name:
            continue
        beside = _plain_of(name, plain_name, results)
        if result.get("talks"):
            found.append(_row(name, result, beside, results.get(beside, {}).get("talks", [])))
        else:
            numbers = {"state": result["state"]}
            found.append(
                {"claim": f"{name}: ran", "passed": False, "cases": [name], "numbers": numbers}
            )
    return found


def _plain_of(name: str, plain_name: str, results: Results) -> str:
    for own in ("talk-other", "talk-tq"):
        if name.startswith(own) and f"{own}-plain" in results:
            return f"{own}-plain"
    return plain_name


def _row(name: str, result: dict[str, Any], beside: str, plain: list[Row]) -> Row:
    rows = result["talks"]
    asked = {_question(one): one for one in plain}
    pairs = [(one, asked[_question(one)]) for one in rows if _question(one) in asked]
    other = [pair for pair in pairs if pair[0]["tokens"] != pair[1]["tokens"]]
    told = talk_figures(result)
    doubtful = sum(in_doubt(one) for one in rows if not one["right"])
    outside = sum(not (in_doubt(one) or in_doubt(two)) for one, two in other)
    caching = bool(result["case"]["options"].get("enable_prefix_caching"))
    surely_wrong, in_plain = told["wrong"] - doubtful, _surely_wrong(plain)
    if "damage" in name:
        claim = f"{name}: the damage is seen"
        passed = surely_wrong > in_plain
    else:
        claim = f"{name}: every answer token for token as without cache and drafts"
        passed = surely_wrong <= in_plain and not outside and len(pairs) == len(rows)
        if name == beside:
            claim = f"{name}: the model knows {1 - UNKNOWN:.0%} of the answers"
            passed = told["wrong"] <= UNKNOWN * len(rows)
        passed &= (told["tokens_found_in_cache"] > 0) == caching
    numbers = {
        **told,
        "wrong_where_the_model_doubts": doubtful,
        "other_than_plain": len(other),
        "other_outside_doubt": outside,
        "compared": len(pairs),
        "right_token_moved_at_most": moved(pairs),
        "wrong_rounds": sorted({one["round"] for one in rows if not one["right"]}),
        "repeats_differ": _repeats_differ(rows),
        "block_tokens": result.get("block_tokens"),
        "acceptance": acceptance(result),
        "acceptance_by_place": acceptance_by_place(result),
    }
    return {"claim": claim, "passed": passed, "cases": [name, beside], "numbers": numbers}


def _surely_wrong(rows: list[Row]) -> int:
    return sum(not one["right"] and not in_doubt(one) for one in rows)


def in_doubt(one: Row) -> bool:
    """Tell whether the first step that is not clear still gives the right token its third."""
    unclear = [value for value in one["logprobs"] if value < CLEAR]
    return bool(unclear) and unclear[0] >= DOUBT


def moved(pairs: list[tuple[Row, Row]]) -> float:
    """Return by how much a right token's log-probability moved at most, before answers part."""
    most = 0.0
    for one, two in pairs:
        steps = zip(one["tokens"], two["tokens"], one["logprobs"], two["logprobs"], strict=True)
        for a, b, first, second in steps:
            most = max(most, abs(first - second))
            if a != b:
                break
    return round(most, 4)


def _question(one: Row) -> tuple[Any, ...]:
    return one["round"], one["client"], one["prompt"]


def _repeats_differ(rows: list[Row]) -> int:
    seen: dict[tuple[Any, ...], list[int]] = {}
    differ = 0
    for one in rows:
        key = one["client"], one["prompt"]
        if seen.setdefault(key, one["tokens"]) != one["tokens"]:
            differ += 1
    return differ
