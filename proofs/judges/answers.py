"""Rows of result files, and the comparison of greedy answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def row(claim: str, passed: bool, cases: list[str], **numbers: Any) -> Row:
    return {"claim": claim, "passed": bool(passed), "cases": cases, "numbers": numbers}


def attempt(name: str, judgement: Callable[[], Row]) -> Row:
    """Return the row, or a failed row if the judge raises."""
    try:
        return judgement()
    except Exception as error:  # a dead engine must not hide the other rows
        return row(name, False, [], judging=f"{type(error).__name__}: {error}"[:300])


TRAINED_NOISE = 0.01
"""Limit for log-probability differences between two computations; measured 0.001."""
TURBOQUANT_NOISE = 0.03
"""The same with a TurboQuant cache: 0.009 with the plugin, 0.07 with the stock backend."""


def compare_answers(reference: Row, result: Row) -> dict[str, Any]:
    """Compare greedy answers up to the first difference, and judge it by the margin.

    Noise is the largest difference of the log-probability of the same token after the same
    prefix; a divergence is a tie when the margin there is within twice that noise.
    """
    noise, divergences, margins = 0.0, 0, []
    for first, second in zip(reference["answers"], result["answers"], strict=True):
        length = min(len(first["tokens"]), len(second["tokens"]))
        for place in range(length):
            if first["tokens"][place] != second["tokens"][place]:
                divergences += 1
                margins.append(min(first["margins"][place], second["margins"][place]))
                break
            noise = max(noise, abs(first["logprobs"][place] - second["logprobs"][place]))
    return {
        "answers": len(reference["answers"]),
        "diverged": divergences,
        "largest_noise": round(noise, 4),
        "margins_there": [round(margin, 4) for margin in margins],
        "beyond_margin": sum(margin > 2 * max(noise, 0.02) for margin in margins),
    }


def answers_agree(comparison: dict[str, Any], max_noise: float) -> bool:
    return not comparison["beyond_margin"] and comparison["largest_noise"] < max_noise


def acceptance(result: Row) -> float | None:
    counters = result.get("counters", {})
    drafted = sum(v for k, v in counters.items() if k.endswith("num_draft_tokens"))
    accepted = sum(v for k, v in counters.items() if k.endswith("num_accepted_tokens"))
    return round(accepted / drafted, 3) if drafted else None
