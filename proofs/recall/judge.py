"""What a run of the recall model found again, where, and how near two runs are.

Pure functions of what ``proofs.recall.engine`` wrote, so that they are tested without a GPU;
``verdicts`` makes the lines of result files of them.
"""

from __future__ import annotations

import math
from typing import Any

Row = dict[str, Any]

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
