"""Figures and result rows of a recall run; pure functions of recorded answers."""

from __future__ import annotations

import math
from typing import Any

Row = dict[str, Any]
Results = dict[str, dict[str, Any]]
CLEAR, DOUBT = math.log(1 / 2), math.log(1 / 3)

PARTS = 4


def share(rows: list[Row]) -> float | None:
    return round(sum(row["right"] for row in rows) / len(rows), 4) if rows else None


def looked_up(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] != "register"]


def registers(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == "register"]


def by_length(rows: list[Row]) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for length in sorted({row["length"] for row in rows}):
        mine = [row for row in rows if row["length"] == length]
        kinds = sorted({row["kind"] for row in mine})
        found[str(length)] = {
            kind: share([row for row in mine if row["kind"] == kind]) for kind in kinds
        }
    return found


def by_depth(rows: list[Row]) -> list[float | None]:
    """Return the shares right of the quarters of a context, its beginning first."""
    quarters: list[list[Row]] = [[] for _ in range(PARTS)]
    for row in looked_up(rows):
        quarters[min(PARTS - 1, int(row["depth"] * PARTS))].append(row)
    return [share(quarter) for quarter in quarters]


def divergence(one: dict[str, float], other: dict[str, float]) -> float:
    """Return KL(one || other) of two lists of best log-probabilities, in nats.

    Tokens in both lists count each for itself, all others as one: never more than the whole
    distributions' divergence.
    """
    shared = one.keys() & other.keys()
    total, rest_one, rest_other = 0.0, 1.0, 1.0
    for token in shared:
        p = math.exp(one[token])
        total += p * (one[token] - other[token])
        rest_one, rest_other = rest_one - p, rest_other - math.exp(other[token])
    floor = 1e-6  # log-probabilities are kept to five digits
    rest_one, rest_other = max(rest_one, 0.0), max(rest_other, floor)
    if rest_one > floor:
        total += rest_one * math.log(rest_one / rest_other)
    return max(total, 0.0)


def divergences(reference: list[Row], rows: list[Row]) -> dict[str, Any]:
    """Compare distributions step by step, as long as both answers have been the same.

    The first step is computed by the prefill, the later ones by the decode kernel.
    """
    first: list[float] = []
    later: list[float] = []
    moved = 0.0
    for one, other in zip(reference, rows, strict=False):
        for place, (a, b) in enumerate(zip(one["steps"], other["steps"], strict=False)):
            if one["tokens"][:place] != other["tokens"][:place]:
                break
            (later if place else first).append(divergence(a, b))
            moved = max(moved, abs(one["logprobs"][place] - other["logprobs"][place]))
    return {
        "first": _spread(first),
        "later": _spread(later),
        "right_token_moved_at_most": round(moved, 4),
    }


def _spread(values: list[float]) -> dict[str, float | int]:
    if not values:
        return {"steps": 0}
    ordered = sorted(values)
    return {
        "steps": len(ordered),
        "mean": float(f"{sum(ordered) / len(ordered):.3g}"),
        "p99": float(f"{ordered[int(0.99 * (len(ordered) - 1))]:.3g}"),
        "most": float(f"{ordered[-1]:.3g}"),
    }


def acceptance(result: dict[str, Any]) -> float | None:
    counters = result.get("counters", {})
    drafted = sum(v for k, v in counters.items() if k.endswith("num_draft_tokens"))
    accepted = sum(v for k, v in counters.items() if k.endswith("num_accepted_tokens"))
    return round(accepted / drafted, 3) if drafted else None


def acceptance_by_place(result: dict[str, Any]) -> list[float] | None:
    """Return the share of drafts accepted at each place of a step."""
    counters = result.get("counters", {})
    steps = sum(v for k, v in counters.items() if k.endswith("num_drafts"))
    places = [v for k, v in counters.items() if k.endswith("accepted_tokens_per_pos")]
    return [round(value / steps, 3) for value in places[0]] if steps and places else None


def figures(result: dict[str, Any]) -> dict[str, Any]:
    case = result.get("case", {})
    found = {
        "state": result["state"],
        "options": case.get("options"),
        "load_s": result.get("load_s"),
        "block_tokens": result.get("block_tokens"),
        "cache_tokens": result.get("cache_tokens"),
        "flash_attention": result.get("flash_attention", "2"),
        "acceptance": acceptance(result),
        "acceptance_by_place": acceptance_by_place(result),
        "log": result.get("log"),
    }
    for key in ("damage", "additional", "environment", "stock_turboquant", "fa2", "xqa"):
        if case.get(key):
            found[key] = case[key]
    if result.get("recall"):
        found["right"] = by_length(result["recall"])
        found["right_by_depth"] = by_depth(result["recall"])
    if result.get("talks"):
        found["talks"] = talk_figures(result)
    if result.get("error"):
        found["error"] = result["error"]
    return found


def talk_figures(result: dict[str, Any]) -> dict[str, Any]:
    rows = result["talks"]
    return {
        "answers": len(rows),
        "wrong": sum(not row["right"] for row in rows),
        "wrong_by_kind": {
            kind: sum(not row["right"] for row in rows if row["kind"] == kind)
            for kind in sorted({row["kind"] for row in rows})
        },
        "tokens_found_in_cache": max((row["hits_so_far"] for row in rows), default=0),
    }


KNOWN = 0.98
"""Share of what stands once in its contexts that the model has to find with a 16-bit cache."""
ENOUGH = 0.99
"""Share of what it finds without doubt that an engine has to find."""
REFERENCE = "recall-16bit"
LOST = 0.1
"""Share that may still be right where the cache was taken away."""


def row(claim: str, passed: bool | None, names: list[str], **numbers: Any) -> Row:
    """Return one line of a result file; ``passed`` is none where nothing was claimed."""
    return {"claim": claim, "passed": passed, "cases": names, "numbers": numbers}


def answers_of(results: Results, name: str) -> list[Row]:
    """Return what an engine answered; nothing if it did not run."""
    found: list[Row] = results.get(name, {}).get("recall", [])
    return found


def tokens_of(rows: list[Row]) -> list[list[int]]:
    return [one["tokens"] for one in rows]


def sure(reference: list[Row], rows: list[Row]) -> list[Row]:
    """Return the answers to what the reference looked up and found without doubt."""
    known = {
        _question(one)
        for one in looked_up(reference)
        if one["right"] and min(one["logprobs"]) >= CLEAR
    }
    return [one for one in rows if _question(one) in known]


def _question(one: Row) -> tuple[Any, ...]:
    return one["length"], one["kind"], one["depth"]


def recall_row(results: Results, name: str, reference: list[Row]) -> Row:
    """Return whether an engine found what it has to; the reference: what the model has to."""
    rows = answers_of(results, name)
    if name == REFERENCE:
        claim = f"{name}: {KNOWN:.0%} of what stands once in the context is found"
        passed = (share(looked_up(rows)) or 0.0) >= KNOWN
    else:
        claim = f"{name}: {ENOUGH:.0%} of what the 16-bit cache finds without doubt is found"
        passed = (share(sure(reference, rows)) or 0.0) >= ENOUGH
    return row(
        claim,
        passed,
        [name],
        right=by_length(rows),
        found=found_of(reference, rows),
        right_by_depth=by_depth(rows),
        divergence=divergences(reference, rows),
        acceptance=acceptance(results.get(name, {})),
    )


def found_of(reference: list[Row], rows: list[Row]) -> dict[str, int]:
    """Count what is found, of everything and of what the reference finds without doubt."""
    asked, known = looked_up(rows), sure(reference, rows)
    return {
        "asked": len(asked),
        "right": sum(one["right"] for one in asked),
        "sure_in_16bit": len(known),
        "of_these_right": sum(one["right"] for one in known),
    }


def states_row(results: Results, name: str, base: list[Row]) -> Row:
    rows = answers_of(results, name)
    before, after = share(registers(base)), share(registers(rows))
    return row(
        f"{name}: without the linear layers' states registers are lost",
        before is not None and after is not None and after < before - 0.25,
        [name],
        registers={"with": before, "without": after},
        looked_up={"with": share(looked_up(base)), "without": share(looked_up(rows))},
    )


def noise_row(results: Results, name: str, base: list[Row]) -> Row:
    rows = answers_of(results, name)
    relative = results[name]["case"]["damage"]["noise"][0]
    return row(
        f"{name}: keys and values off by {relative:.0%} of their size",
        None if relative < 1 else bool(rows) and (share(sure(base, rows)) or 0.0) < KNOWN,
        [name],
        right=by_length(rows),
        found=found_of(base, rows),
        right_by_depth=by_depth(rows),
        divergence=divergences(base, rows),
    )
