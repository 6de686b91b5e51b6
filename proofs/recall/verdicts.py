"""Judges of the recall proofs, by stage.

The model must know its language (``KNOWN``). An engine must find everything that the model finds
reliably with a 16-bit cache, so no claim depends on a single training. Each claim about a cache
comes with a damaged engine that must fail the same judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proofs.recall.judge import (
    ENOUGH,
    KNOWN,
    LOST,
    Results,
    Row,
    acceptance,
    acceptance_by_place,
    answers_of,
    by_length,
    divergences,
    looked_up,
    noise_row,
    recall_row,
    row,
    share,
    states_row,
    sure,
    tokens_of,
)
from proofs.recall.talk_verdicts import judge_talks


def judge_flashinfer(results: Results, reference: dict[str, Any]) -> list[Row]:
    base, found = reference.get("recall", []), []
    ahead = [name for name, result in results.items() if _runs_ahead(result["case"])]
    for name, result in results.items():
        if "talk" in name or name in ahead:
            continue
        if not result.get("recall"):
            error = str(result.get("error", [""])[0]).partition("\n")[0]
            found.append(row(f"{name}: ran", False, [name], state=result["state"], error=error))
        elif "states" in name:
            found.append(states_row(results, name, base))
        elif "noise" in name:
            found.append(noise_row(results, name, base))
        else:
            found.append(recall_row(results, name, base))
    if ahead:
        found.append(_ahead_row({name: results[name] for name in ahead}, base))
    return found + judge_talks(results, "fi-talk-plain")


def _runs_ahead(case: dict[str, Any]) -> bool:
    """Tell of FlashInfer's attention where the host prepares a step before the last one ended.

    How often such engines break down hangs on how fast the host is: they are judged together.
    """
    options = case["options"]
    mine = options.get("attention_config", {}).get("backend") == "FLASHINFER"
    waits = "speculative_config" in options or "environment" in case or case.get("damage")
    return bool(mine and not waits and options.get("async_scheduling", True))


def _ahead_row(results: Results, base: list[Row]) -> Row:
    """Claim that a rail rests on: not every such engine holds what all others have to."""
    became: dict[str, str] = {}
    bad = 0
    for name, result in results.items():
        known = sure(base, answers_of(results, name))
        lost = sum(not one["right"] for one in known)
        error = str(result.get("error", [""])[0]).partition("\n")[0]
        became[name] = f"{lost} of {len(known)} lost" if known else error or result["state"]
        bad += not known or 1 - lost / len(known) < ENOUGH
    ran = all(result["state"] in ("ran", "refused") for result in results.values())
    return row(
        "FlashInfer attention without drafts, where the host prepares the next step: some engines "
        "break down or lose answers",
        ran and bad > 0,
        list(results),
        engines=len(became),
        broke_down_or_lost=bad,
        became=became,
    )


THREE_BITS = ("k3v4", "3bit")
"""Presets with keys of three bits; a rail warns of them."""
TAKEN = ("tq-k8v4", "tq-4bit_nc")
"""Engines with the presets that a profile may take."""


def judge_recall(results: Results, reference: dict[str, Any]) -> list[Row]:
    """The model knows its language with a 16-bit cache, and damage is seen where it was done."""
    base = reference.get("recall", [])
    found = [
        recall_row(results, name, base)
        for name in results
        if not name.startswith("damage") and results[name].get("recall")
    ]
    for name in results:
        judges = {"damage-band": _band_row, "damage-states": states_row}
        if name.startswith("damage") and results[name].get("recall"):
            found.append(judges.get(name, noise_row)(results, name, base))
    return found


def _band_row(results: Results, name: str, base: list[Row]) -> Row:
    start, end = results[name]["case"]["damage"]["band"]
    rows = sure(base, answers_of(results, name))
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


def judge_turboquant(results: Results, reference: dict[str, Any]) -> list[Row]:
    """Recall and divergence of each preset; the engine's own backend with drafts beside it."""
    base, found = reference.get("recall", []), []
    for name, result in results.items():
        if not result.get("recall"):
            found.append(row(f"{name}: ran", False, [name], state=result["state"]))
            continue
        one = recall_row(results, name, base)
        if result["case"].get("stock_turboquant"):
            one |= _stock_row(name, one)
        elif any(preset in name for preset in THREE_BITS):
            one |= _three_bits_row(results, name, base)
        found.append(one)
    return found


def _stock_row(name: str, one: Row) -> Row:
    """Claim of the engine's own backend: it finds the same without drafts and loses with them."""
    if "mtp" not in name:
        return {"claim": f"{one['claim']}, by the engine's own backend"}
    claim = f"{name}: the engine's own backend loses with drafts what ours finds with them"
    return {"claim": claim, "passed": not one["passed"]}


def _three_bits_row(results: Results, name: str, base: list[Row]) -> Row:
    """Claim of a preset with keys of three bits: it costs more than those that a profile takes."""
    others = [other for other in TAKEN if answers_of(results, other)]
    mine, *theirs = (_moved(base, answers_of(results, other)) for other in (name, *others))
    claim = f"{name}: further from 16 bit than every preset that a profile takes"
    return {"claim": claim, "passed": bool(theirs) and mine > max(theirs)}


def _moved(base: list[Row], rows: list[Row]) -> float:
    return float(divergences(base, rows)["later"].get("mean", 0.0))


def judge_prefixes(results: Results, reference: dict[str, Any]) -> list[Row]:
    return judge_talks(results, "talk-plain")


def judge_wide(results: Results, reference: dict[str, Any]) -> list[Row]:
    """Five sequences of 262,144 tokens at once: the same answers as one after the other.

    The model was taught positions to 140,000 and does not find everything there; what is judged is
    that company, graphs and drafts change nothing, and what a format changes is told.
    """
    base, found = answers_of(results, "wide-16bit"), []
    for name in results:
        rows, beside = answers_of(results, name), _alone_of(name, results)
        other = answers_of(results, beside)
        claim, passed = f"{name}: what is found", None if rows else False
        if beside != name:
            claim = f"{name}: five at once, answered as {beside} answers"
            passed = bool(rows) and tokens_of(rows) == tokens_of(other)
        found.append(
            row(
                claim,
                passed,
                [name, beside],
                right=by_length(rows),
                as_16bit=tokens_of(rows) == tokens_of(base),
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
    plain = answers_of(results, "drafts-none")
    found = []
    for name, result in results.items():
        rows = answers_of(results, name)
        same = tokens_of(rows) == tokens_of(plain)
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


JUDGES: dict[str, Callable[[Results, dict[str, Any]], list[Row]]] = {
    "recall": judge_recall,
    "turboquant": judge_turboquant,
    "wide": judge_wide,
    "drafts": judge_drafts,
    "prefixes": judge_prefixes,
    "flashinfer": judge_flashinfer,
    "flashinfer-waiting": judge_flashinfer,
}
