"""Rows of result files, and the comparison of greedy answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def row(claim: str, passed: bool, cases: list[str], **numbers: Any) -> Row:
    return {"claim": claim, "passed": bool(passed), "cases": cases, "numbers": numbers}


def attempt(name: str, judgement: Callable[[], Row]) -> Row:
    """Return a row even when a run left nothing to judge: it has failed then."""
    try:
        return judgement()
    except Exception as error:  # one dead engine must not hide the other rows
        return row(name, False, [], judging=f"{type(error).__name__}: {error}"[:300])


TRAINED_NOISE = 0.01
"""Of a log-probability of the lab's trained model between two ways to compute it: 0.001 so far."""
TURBOQUANT_NOISE = 0.03
"""The same with a TurboQuant cache: 0.009 with our backend, 0.07 with the engine's own."""


def compare_answers(one: Row, two: Row) -> dict[str, Any]:
    """Compare greedy answers up to each first difference, and judge that by its margin.

    Noise is the largest difference of the log-probability of the same token after the same
    prefix; a divergence is a tie when the margin there is within twice that noise.
    """
    noise, divergences, margins = 0.0, 0, []
    for first, second in zip(one["answers"], two["answers"], strict=True):
        length = min(len(first["tokens"]), len(second["tokens"]))
        for place in range(length):
            if first["tokens"][place] != second["tokens"][place]:
                divergences += 1
                margins.append(min(first["margins"][place], second["margins"][place]))
                break
            noise = max(noise, abs(first["logprobs"][place] - second["logprobs"][place]))
    return {
        "answers": len(one["answers"]),
        "diverged": divergences,
        "largest_noise": round(noise, 4),
        "margins_there": [round(margin, 4) for margin in margins],
        "beyond_margin": sum(margin > 2 * max(noise, 0.02) for margin in margins),
    }


def same(found: dict[str, Any], most_noise: float) -> bool:
    """Tell whether answers agree outside ties and are near: noise alone would excuse itself."""
    return not found["beyond_margin"] and found["largest_noise"] < most_noise


def acceptance(result: Row) -> float | None:
    found = result.get("counters", {})
    drafted = sum(v for k, v in found.items() if k.endswith("num_draft_tokens"))
    accepted = sum(v for k, v in found.items() if k.endswith("num_accepted_tokens"))
    return round(accepted / drafted, 3) if drafted else None
