"""What the runs with drafts prove: equal answers, and how many drafts were taken."""

from __future__ import annotations

from proofs.drafts.cases import PLAIN, RANDOM, SPOILT, Cases
from proofs.drafts.trees import SPOILT_TENSOR
from proofs.judges.answers import TRAINED_NOISE, acceptance, compare_answers, same
from proofs.judges.rows import Row, attempt, row

LEAST = 0.5
"""Of the drafts of a trained draft; the last ones of an answer go beyond its end."""
MOST_BY_CHANCE = 0.05


def judge_drafts(results: dict[str, Row], cases: Cases) -> list[Row]:
    return [
        attempt(name, lambda n=name: judged(results, n))
        for name in (one["name"] for one in cases if one["name"] != PLAIN)
    ]


def judged(results: dict[str, Row], name: str) -> Row:
    if name.endswith(SPOILT):
        return _refused(results[name], name)
    if results[name]["state"] != "ran":
        error = str(results[name].get("error", [""])[0])[:200]
        return row(f"{name}: ran", False, [name], state=results[name]["state"], error=error)
    found = compare_answers(results[PLAIN], results[name])
    accepted = acceptance(results[name])
    if name.endswith(RANDOM):
        right = accepted is not None and accepted < MOST_BY_CHANCE
        words = f"at most {MOST_BY_CHANCE} of its drafts are taken"
    else:
        right = (accepted or 0) > LEAST
        words = f"more than {LEAST} of its drafts are taken"
    return row(
        f"{name}: greedy answers equal {PLAIN} outside ties, {words}",
        same(found, TRAINED_NOISE) and right,
        [name, PLAIN],
        acceptance=accepted,
        counters=results[name]["counters"],
        downgraded=[t for t in results[name].get("log_lines", []) if "setting cudagraph" in t],
        **found,
    )


def _refused(result: Row, name: str) -> Row:
    error = str(result.get("error", [""])[0])
    return row(
        f"{name}: a draft with a number that is NaN is refused by the tensor's name",
        result["state"] == "refused" and "NaN" in error and f"model.{SPOILT_TENSOR};" in error,
        [name],
        state=result["state"],
        error=error[:300],
    )
