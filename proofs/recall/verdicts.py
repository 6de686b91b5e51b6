"""Judges of the recall proofs: which claims hold.

The model must know its language (``KNOWN``); an engine must find everything that the model finds
without doubt with a 16-bit cache, whatever that is: no claim about an engine hangs on one training.
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
)
from proofs.recall.talk_verdicts import CLEAR, judge_talks

Results = dict[str, dict[str, Any]]

KNOWN = 0.9
"""Share of what stands once in its contexts that the model has to find with a 16-bit cache."""
ENOUGH = 0.99
"""Share of what it finds without doubt that an engine has to find."""
REFERENCE = "recall-16bit"
MEASURED = ("k3v4", "3bit")
"""Presets that no profile takes: what they cost is measured, nothing is claimed."""
LOST = 0.1
"""Share that may still be right where the cache was taken away."""


def row(claim: str, passed: bool | None, names: list[str], **numbers: Any) -> Row:
    """Return one line of a result file; ``passed`` is none where nothing was claimed."""
    return {"claim": claim, "passed": passed, "cases": names, "numbers": numbers}


def _answers(results: Results, name: str) -> list[Row]:
    found: list[Row] = results.get(name, {}).get("recall", [])
    return found


def _tokens(rows: list[Row]) -> list[list[int]]:
    return [one["tokens"] for one in rows]


def _tokens(rows: list[Row]) -> list[list[int]]:
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


def _recall_row(results: Results, name: str, reference: list[Row]) -> Row:
    rows = _answers(results, name)
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
        found=_found(reference, rows),
        right_by_depth=by_depth(rows),
        divergence=divergences(reference, rows),
        acceptance=acceptance(results.get(name, {})),
    )


def _found(reference: list[Row], rows: list[Row]) -> dict[str, int]:
    """Count what is found, of everything and of what the reference finds without doubt."""
    asked, known = looked_up(rows), sure(reference, rows)
    return {
        "asked": len(asked),
        "right": sum(one["right"] for one in asked),
        "sure_in_16bit": len(known),
        "of_these_right": sum(one["right"] for one in known),
    }


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
    rows = sure(base, _answers(results, name))
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
    return row(
        f"{name}: keys and values off by {relative:.0%} of their size",
        None if relative < 1 else bool(rows) and (share(sure(base, rows)) or 0.0) < KNOWN,
        [name],
        right=by_length(rows),
        found=_found(base, rows),
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
        elif any(preset in name for preset in MEASURED):
            one |= {"passed": None, "claim": f"{name}: what is found"}
        found.append(one)
    return found


def judge_prefixes(results: Results, reference: dict[str, Any]) -> list[Row]:
    """Conversations with a cache of prefixes and drafts against an engine with neither."""
    return judge_talks(results, "talk-plain")


def judge_wide(results: Results, reference: dict[str, Any]) -> list[Row]:
    """Five sequences of 262,144 tokens at once: the same answers as one after the other.

    The model was taught positions to 140,000 and does not find everything there; what is judged is
    that company, graphs and drafts change nothing, and what a format changes is told.
    """
    base, found = _answers(results, "wide-16bit"), []
    for name in results:
        rows, beside = _answers(results, name), _alone_of(name, results)
        other = _answers(results, beside)
        claim, passed = f"{name}: what is found", None if rows else False
        if beside != name:
            claim = f"{name}: five at once, answered as {beside} answers"
            passed = bool(rows) and _tokens(rows) == _tokens(other)
        found.append(
            row(
                claim,
                passed,
                [name, beside],
                right=by_length(rows),
                as_16bit=_tokens(rows) == _tokens(base),
                divergence_from_16bit=divergences(base, rows),
                divergence=divergences(other, rows),
            )
        )
    return found


def _alone_of(name: str, results: Results) -> str:
    """Return the engine that computed the same one after the other, or eagerly."""
    plain = name.removesuffix("-alone").removesuffix("-full-mtp2")
    return f"{plain}-alone" if f"{plain}-alone" in results else plain


def judge_drafts(results: Results, reference: dict[str, Any]) -> list[Row]:
    """Drafts change no answer, whichever format the drafter has; a broken one is seen."""
    plain = _answers(results, "drafts-none")
    found = []
    for name, result in results.items():
        rows = _answers(results, name)
        same = _tokens(rows) == _tokens(plain)
        share_accepted = acceptance(result)
        numbers = {
            "answers": len(rows),
            "acceptance": share_accepted,
            "acceptance_by_place": acceptance_by_place(result),
            "divergence": divergences(plain, rows),
        }
        known = share(looked_up(rows)) or 0.0
        claim = f"{name}: every answer as without drafts"
        passed = bool(rows) and same and known >= KNOWN
        if "damage" in name:
            claim = f"{name}: a drafter that sees noise is accepted almost never; answers stay"
            passed &= share_accepted is not None and share_accepted < LOST
        found.append(row(claim, passed, [name, "drafts-none"], **numbers))
    return found


def judge_flashinfer(results: Results, reference: dict[str, Any]) -> list[Row]:
    """FlashInfer's kernels find what flash-attention and Triton find."""
    base, found = reference.get("recall", []), []
    for name, result in results.items():
        if "talk" in name:
            continue
        if not result.get("recall"):
            found.append(_broken_row(name, result))
        elif "states" in name:
            found.append(_states_row(results, name, base))
        elif "noise" in name:
            found.append(_noise_row(results, name, base))
        else:
            found.append(_recall_row(results, name, base))
            if _runs_ahead(result["case"]):
                found[-1] |= {"passed": None, "claim": f"{name}: what is found"}
    return found + judge_talks(results, "fi-talk-plain")


def _runs_ahead(case: dict[str, Any]) -> bool:
    """Tell of FlashInfer's attention where the host prepares a step before the last one ended.

    Such engines break down, so what one of them finds is a measurement and no claim.
    """
    options = case["options"]
    mine = options.get("attention_config", {}).get("backend") == "FLASHINFER"
    waits = "speculative_config" in options or "environment" in case
    return mine and not waits and options.get("async_scheduling", True)


def _broken_row(name: str, result: dict[str, Any]) -> Row:
    error = str(result.get("error", [""])[0]).partition("\n")[0]
    numbers = {"state": result["state"], "error": error}
    if result["state"] == "refused" and _runs_ahead(result["case"]):
        return row(f"{name}: breaks down while it answers", None, [name], **numbers)
    return row(f"{name}: ran", False, [name], **numbers)


JUDGES: dict[str, Callable[[Results, dict[str, Any]], list[Row]]] = {
    "recall": judge_recall,
    "turboquant": judge_turboquant,
    "wide": judge_wide,
    "drafts": judge_drafts,
    "prefixes": judge_prefixes,
    "flashinfer": judge_flashinfer,
    "flashinfer-waiting": judge_flashinfer,
}
