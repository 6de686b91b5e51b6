"""Lines of result files about one engine: what it found, and what was lost where damage was done.

Shared by the judges of all recall proofs.
"""

from __future__ import annotations

from typing import Any

from proofs.recall.judge import (
    Row,
    acceptance,
    by_depth,
    by_length,
    divergences,
    looked_up,
    registers,
    share,
)
from proofs.recall.talk_verdicts import CLEAR

Results = dict[str, dict[str, Any]]

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
