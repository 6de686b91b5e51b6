"""Rows of result files, and the comparison of greedy answers."""

import math
import traceback
from collections.abc import Callable
from typing import Any

from proofs.result_files import engines_of

Row = dict[str, Any]


def row(claim: str, passed: bool | None, cases: list[str], **numbers: Any) -> Row:
    passed = passed if passed is None else bool(passed)
    return {"claim": claim, "passed": passed, "cases": cases, "numbers": numbers}


def failed_start(name: str, result: Row) -> Row:
    error = str(result.get("error", [""])[0]).partition("\n")[0][:400]
    return row(f"{name}: runs and is judged", False, [name], state=result["state"], error=error)


def change(first: float, second: float) -> float:
    """Return how much a log-probability changes; NaN is an infinite change."""
    difference = abs(first - second)
    return math.inf if math.isnan(difference) else difference


def attempt(name: str, judge: Callable[..., Row], *arguments: Any, **named: Any) -> Row:
    try:
        return judge(*arguments, **named)
    except Exception as error:  # a dead engine must not hide the other rows
        return row(name, False, [], judging=f"{type(error).__name__}: {error}"[:300])


def judge_engines(
    results: dict[str, Row], judge: Callable[..., list[Row]], *arguments: Any
) -> list[Row]:
    """Return the rows of a judge, and a failed row for every engine without a row."""
    try:
        rows = judge(*arguments)
    except Exception:  # keep the results of the engines
        rows = [row("judge", False, [], failure=traceback.format_exc()[-1500:])]
    judged = {name for entry in rows for name in engines_of(entry)}
    return rows + [failed_start(name, results[name]) for name in results if name not in judged]


def show(shown: Row, claim: str) -> Row:
    """Return a comparison that is not judged; an engine that did not run still fails."""
    compared = "diverged" in shown["numbers"]
    return {**shown, "claim": claim, "passed": None if compared else False}


TRAINED_NOISE = 0.01
TURBOQUANT_NOISE = 0.03
"""The same with a TurboQuant cache: 0.009 with the plugin, 0.07 with the stock backend."""


def compare_answers(reference: Row, result: Row) -> dict[str, Any]:
    """Compare greedy answers up to the first difference.

    Noise is the largest difference of the log-probability of a token after the same prefix; a
    divergence is a tie when the margin there is within twice that noise.
    """
    noise, divergences, margins = 0.0, 0, []
    for first, second in zip(reference["answers"], result["answers"], strict=True):
        length = min(len(first["tokens"]), len(second["tokens"]))
        for place in range(length):
            if first["tokens"][place] != second["tokens"][place]:
                divergences += 1
                margins.append(min(first["margins"][place], second["margins"][place]))
                break
            noise = max(noise, change(first["logprobs"][place], second["logprobs"][place]))
    return {
        "answers": len(reference["answers"]),
        "diverged": divergences,
        "largest_noise": round(noise, 4),
        "margins_there": [round(margin, 4) for margin in margins],
        "beyond_margin": sum(margin > 2 * max(noise, 0.02) for margin in margins),
    }


def answers_agree(comparison: dict[str, Any], max_noise: float) -> bool:
    return not comparison["beyond_margin"] and comparison["largest_noise"] < max_noise


def judge_same_answers(
    results: dict[str, Row],
    name: str,
    reference: str,
    claim: str,
    *,
    max_noise: float = TRAINED_NOISE,
    accepts: Callable[[float | None], bool] = lambda share: True,
) -> Row:
    result = results[name]
    if result["state"] != "ran":
        return failed_start(name, result)
    comparison, share = compare_answers(results[reference], result), acceptance(result)
    return row(
        f"{name}: {claim}",
        answers_agree(comparison, max_noise) and accepts(share),
        [name, reference],
        acceptance=share,
        counters=result["counters"],
        downgraded=[line for line in result["log_lines"] if "setting cudagraph" in line],
        **comparison,
    )


def acceptance(result: Row) -> float | None:
    counters = result.get("counters", {})
    drafted = sum(v for k, v in counters.items() if k.endswith("num_draft_tokens"))
    accepted = sum(v for k, v in counters.items() if k.endswith("num_accepted_tokens"))
    return round(accepted / drafted, 3) if drafted else None


def cache_hits(turn: Row) -> float:
    counts = [
        value - turn["before"].get(key, 0)
        for key, value in turn["counters"].items()
        if key.endswith("prefix_cache_hits")
    ]
    return float(sum(counts))
