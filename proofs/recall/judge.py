import math
from typing import Any

from proofs.judges.answers import acceptance, change, row

Row = dict[str, Any]
Results = dict[str, dict[str, Any]]
CLEAR = math.log(1 / 2)
TIE = 0.13
"""Tokens are tied if their log-probabilities differ by less: twice the largest change of a right
token's log-probability between engines that answer alike (0.064)."""
STEPS_KEPT = 6

PARTS = 4


def share(rows: list[Row]) -> float | None:
    return round(sum(row["right"] for row in rows) / len(rows), 4) if rows else None


def looked_up(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] != "register"]


def registers(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == "register"]


def by_length(rows: list[Row]) -> dict[str, dict[str, float | None]]:
    shares: dict[str, dict[str, float | None]] = {}
    for length in sorted({answer["length"] for answer in rows}):
        selected = [row for row in rows if row["length"] == length]
        kinds = sorted({row["kind"] for row in selected})
        shares[str(length)] = {
            kind: share([row for row in selected if row["kind"] == kind]) for kind in kinds
        }
    return shares


def by_depth(rows: list[Row]) -> list[float | None]:
    quarters: list[list[Row]] = [[] for _ in range(PARTS)]
    for answer in looked_up(rows):
        quarters[min(PARTS - 1, int(answer["depth"] * PARTS))].append(answer)
    return [share(quarter) for quarter in quarters]


COUNTS = ("talks", "answers", "tokens", "wrong")
ROUNDING = 1e-4


def judge_answer(answer: Row, wanted: list[int]) -> Row:
    right = [
        step.get(str(token), min(step.values()))
        for step, token in zip(answer["steps"], wanted, strict=True)
    ]
    return {
        "right": answer["tokens"] == wanted,
        "tokens": answer["tokens"],
        "logprobs": [round(value, 4) for value in right],
        "best": [best_tokens(step) for step in answer["steps"]],
        "steps": answer["steps"][:STEPS_KEPT],
    }


def best_tokens(step: dict[str, float]) -> dict[str, float]:
    return dict(sorted(step.items(), key=lambda item: -item[1])[:5])


def unlikely_steps(answer: Row) -> list[Row]:
    """Return the steps with NaN or a token that is not the most likely, with the best five."""
    found = []
    for place, (token, step) in enumerate(zip(answer["tokens"], answer["steps"], strict=True)):
        best = best_tokens(step)
        own = step.get(str(token), -math.inf)
        if math.isnan(sum(step.values())) or own < next(iter(best.values())) - ROUNDING:
            found.append({"place": place, "token": token, "logprob": own, "best": best})
    return found


def divergence(first: dict[str, float], second: dict[str, float]) -> float:
    """Return KL(first || second) of two lists of best log-probabilities, in nats.

    A lower bound: tokens outside the intersection are one bucket.
    """
    shared = first.keys() & second.keys()
    total, rest_first, rest_second = 0.0, 1.0, 1.0
    for token in shared:
        p = math.exp(first[token])
        total += p * (first[token] - second[token])
        rest_first, rest_second = rest_first - p, rest_second - math.exp(second[token])
    floor = 1e-6  # log-probabilities are kept to five digits
    rest_first, rest_second = max(rest_first, 0.0), max(rest_second, floor)
    if rest_first > floor:
        total += rest_first * math.log(rest_first / rest_second)
    return max(total, 0.0)


def divergences(reference: list[Row], rows: list[Row]) -> dict[str, Any]:
    """Compare distributions step by step, up to the first different token.

    Prefill computes the first step, the decode kernel the later steps.
    """
    first: list[float] = []
    later: list[float] = []
    moved = 0.0
    for expected, computed in zip(reference, rows, strict=False):
        for place, (a, b) in enumerate(zip(expected["steps"], computed["steps"], strict=False)):
            if expected["tokens"][:place] != computed["tokens"][:place]:
                break
            (later if place else first).append(divergence(a, b))
            moved = max(moved, change(expected["logprobs"][place], computed["logprobs"][place]))
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


def acceptance_by_place(result: dict[str, Any]) -> list[float] | None:
    counters = result.get("counters", {})
    steps = sum(v for k, v in counters.items() if k.endswith("num_drafts"))
    places = [v for k, v in counters.items() if k.endswith("accepted_tokens_per_pos")]
    return [round(value / steps, 3) for value in places[0]] if steps and places else None


def figures(result: dict[str, Any]) -> dict[str, Any]:
    case = result.get("case", {})
    values = {
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
            values[key] = case[key]
    if result.get("recall"):
        values["right"] = by_length(result["recall"])
        values["right_by_depth"] = by_depth(result["recall"])
    if result.get("talks"):
        values["talks"] = talk_figures(result)
    if result.get("error"):
        values["error"] = result["error"]
    return values


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
"""Share of records and passages that the model must find with a 16-bit cache."""
ENOUGH = 0.99
"""Share of reliable answers that an engine must find."""
REFERENCE = "recall-16bit"
LOST = 0.1
"""Share that may be right without the cache."""


def answers_of(results: Results, name: str) -> list[Row]:
    rows: list[Row] = results.get(name, {}).get("recall", [])
    return rows


def tokens_of(rows: list[Row]) -> list[list[int]]:
    return [row["tokens"] for row in rows]


def sure(reference: list[Row], rows: list[Row]) -> list[Row]:
    known = {
        _question(row)
        for row in looked_up(reference)
        if row["right"] and min(row["logprobs"]) >= CLEAR
    }
    return [row for row in rows if _question(row) in known]


def _question(row: Row) -> tuple[Any, ...]:
    return row["length"], row["kind"], row["depth"]


def recall_row(results: Results, name: str, reference: list[Row]) -> Row:
    rows = answers_of(results, name)
    if name == REFERENCE:
        claim = f"{name}: {KNOWN:.0%} of records and passages are found"
        passed = (share(looked_up(rows)) or 0.0) >= KNOWN
    else:
        claim = f"{name}: {ENOUGH:.0%} of the reliable answers of the 16-bit cache are found"
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


def found_of(reference: list[Row], rows: list[Row]) -> dict[str, Any]:
    questions, known = looked_up(rows), sure(reference, rows)
    right = sum(row["right"] for row in questions)
    return {
        "asked": len(questions),
        "right": right,
        "right_interval_95": wilson_interval(right, len(questions)),
        "sure_in_16bit": len(known),
        "of_these_right": sum(row["right"] for row in known),
    }


def wilson_interval(right: int, asked: int) -> list[float]:
    """Return the 95 % confidence interval of a share (Wilson, 1927)."""
    if not asked:
        return [0.0, 1.0]
    z = 1.96
    middle = (right + z * z / 2) / (asked + z * z)
    half = z * math.sqrt(right * (asked - right) / asked + z * z / 4) / (asked + z * z)
    return [round(middle - half, 4), round(middle + half, 4)]


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
