"""Judges of the recall proofs: which claims hold.

Every claim about a cache has a damaged engine beside it, which the same judge must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proofs.recall.judge import (
    Row,
    acceptance,
    acceptance_by_place,
    by_depth,
    by_length,
    divergences,
    looked_up,
    registers,
    share,
    talk_figures,
)

Results = dict[str, dict[str, Any]]

ENOUGH = 0.99
"""Share of answers that has to be right."""
LOST = 0.1
"""Share that may still be right where the cache was taken away."""


def row(claim: str, passed: bool | None, names: list[str], **numbers: Any) -> Row:
    """Return one line of a result file; ``passed`` is none where nothing was claimed."""
    return {"claim": claim, "passed": passed, "cases": names, "numbers": numbers}


def _answers(results: Results, name: str) -> list[Row]:
    found: list[Row] = results.get(name, {}).get("recall", [])
    return found


def _recall_row(results: Results, name: str, reference: list[Row]) -> Row:
    rows = _answers(results, name)
    shares = [share(looked_up([r for r in rows if r["length"] == x])) for x in _lengths(rows)]
    return row(
        f"{name}: {ENOUGH:.0%} of what stands once in the context is found, at every length",
        bool(rows) and all(value is not None and value >= ENOUGH for value in shares),
        [name],
        right=by_length(rows),
        right_by_depth=by_depth(rows),
        divergence=divergences(reference, rows),
        acceptance=acceptance(results.get(name, {})),
    )


def _lengths(rows: list[Row]) -> list[int]:
    return sorted({row["length"] for row in rows})


def judge_recall(results: Results, reference: dict[str, Any]) -> list[Row]:
    """The model knows its language with a 16-bit cache, and damage is seen where it was done."""
    base = reference.get("recall", [])
    found = [
        _recall_row(results, name, base)
        for name in results
        if not name.startswith("damage") and results[name].get("recall")
    ]
    for name in results:
        judges = {"damage-band": _band_row, "damage-states": _states_row}
        if name.startswith("damage") and results[name].get("recall"):
            found.append(judges.get(name, _noise_row)(results, name, base))
    return found


def _band_row(results: Results, name: str, base: list[Row]) -> Row:
    start, end = results[name]["case"]["damage"]["band"]
    rows = looked_up(_answers(results, name))
    inside = [r for r in rows if start <= r["depth"] * r["length"] < end]
    outside = [r for r in rows if r not in inside]
    seen = (share(inside) or 0.0, share(outside) or 0.0)
    return row(
        f"{name}: positions {start} to {end} taken out of the cache: only they are lost",
        bool(inside) and seen[0] <= LOST and seen[1] >= 0.9,
        [name],
        inside={"answers": len(inside), "right": seen[0]},
        outside={"answers": len(outside), "right": seen[1]},
    )


def _states_row(results: Results, name: str, base: list[Row]) -> Row:
    rows = _answers(results, name)
    before, after = share(registers(base)), share(registers(rows))
    return row(
        f"{name}: without the linear layers' states registers are lost",
        before is not None and after is not None and after < before - 0.25,
        [name],
        registers={"with": before, "without": after},
        looked_up={"with": share(looked_up(base)), "without": share(looked_up(rows))},
    )


def _noise_row(results: Results, name: str, base: list[Row]) -> Row:
    rows = _answers(results, name)
    relative = results[name]["case"]["damage"]["noise"][0]
    right = share(looked_up(rows))
    return row(
        f"{name}: keys and values off by {relative:.0%} of their size",
        None if relative < 1 else right is not None and right < ENOUGH,
        [name],
        right=by_length(rows),
        right_by_depth=by_depth(rows),
        divergence=divergences(base, rows),
    )


def judge_turboquant(results: Results, reference: dict[str, Any]) -> list[Row]:
    """Recall and divergence of each preset; the engine's own backend with drafts beside it."""
    base, found = reference.get("recall", []), []
    for name, result in results.items():
        if not result.get("recall"):
            found.append(row(f"{name}: ran", False, [name], state=result["state"]))
            continue
        one = _recall_row(results, name, base)
        if result["case"].get("stock_turboquant"):
            one["passed"] = None  # a measurement of somebody else's code
            one["claim"] = f"{name}: what the engine's own backend finds"
        found.append(one)
    return found


def judge_prefixes(results: Results, reference: dict[str, Any]) -> list[Row]:
    """Conversations with a cache of prefixes and drafts against an engine with neither."""
    return _judge_talks(results, "talk-plain")


def _judge_talks(results: Results, plain_name: str) -> list[Row]:
    plain = results.get(plain_name, {}).get("talks", [])
    found = []
    for name, result in results.items():
        if "talk" not in name:
            continue
        damaged = "damage" in name
        if not result.get("talks"):
            found.append(row(f"{name}: ran", False, [name], state=result["state"]))
            continue
        rows = result["talks"]
        asked = {_question(one): one for one in plain}
        other = [
            one
            for one in rows
            if _question(one) in asked and one["tokens"] != asked[_question(one)]["tokens"]
        ]
        told = talk_figures(result)
        caching = bool(result["case"]["options"].get("enable_prefix_caching"))
        as_wanted = not told["wrong"] and not other and bool(plain)
        if damaged:
            claim = f"{name}: the damage is seen"
            passed = told["wrong"] > 0
        else:
            claim = f"{name}: every answer right, and token for token as without cache and drafts"
            passed = as_wanted and (told["tokens_found_in_cache"] > 0) == caching
        found.append(
            row(
                claim,
                passed,
                [name, plain_name],
                **told,
                other_than_plain=len(other),
                compared=sum(_question(one) in asked for one in rows),
                wrong_rounds=sorted({one["round"] for one in rows if not one["right"]}),
                repeats_differ=_repeats_differ(rows),
                block_tokens=result.get("block_tokens"),
                acceptance=acceptance(result),
                acceptance_by_place=acceptance_by_place(result),
            )
        )
    return found


def _question(one: Row) -> tuple[Any, ...]:
    """Name a question by whoever asked what after how much, and the round."""
    return one["round"], one["client"], one["kind"], one["length"], one.get("place", 0)


def _repeats_differ(rows: list[Row]) -> int:
    """Return how many questions that were asked again got another answer."""
    seen: dict[tuple[Any, ...], list[int]] = {}
    differ = 0
    for one in rows:
        key = one["client"], one.get("prompt", one["length"])
        if seen.setdefault(key, one["tokens"]) != one["tokens"]:
            differ += 1
    return differ


def judge_flashinfer(results: Results, reference: dict[str, Any]) -> list[Row]:
    """FlashInfer's kernels find what flash-attention and Triton find."""
    base, found = reference.get("recall", []), []
    for name, result in results.items():
        if result.get("recall") and "states" in name:
            found.append(_states_row(results, name, base))
        elif "talk" not in name:
            found.append(
                _recall_row(results, name, base)
                if result.get("recall")
                else row(f"{name}: ran", False, [name], state=result["state"])
            )
    return found + _judge_talks(results, "fi-talk-plain")


JUDGES: dict[str, Callable[[Results, dict[str, Any]], list[Row]]] = {
    "recall": judge_recall,
    "turboquant": judge_turboquant,
    "prefixes": judge_prefixes,
    "flashinfer": judge_flashinfer,
}
