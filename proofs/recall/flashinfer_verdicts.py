"""Judge of FlashInfer's kernels: for attention, and for the prefill of linear layers."""

from __future__ import annotations

from typing import Any

from proofs.recall.judge import Row
from proofs.recall.rows import (
    ENOUGH,
    Results,
    answers_of,
    noise_row,
    recall_row,
    row,
    states_row,
    sure,
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
