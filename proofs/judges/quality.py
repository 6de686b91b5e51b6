"""Judges how far served logits are from those of the same model in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from proofs.engine.profile_cases import MODELS, SIXTEEN_BIT, VARIANTS

Row = dict[str, Any]
FARTHER = {"tiny": 0.02, "recall": 0.002}
"""By how much the mean divergence from 16 bits, in nats, may be above that of the INT4 base.

By model: FP8 activations cost the lab's model 0.01, the recall model nothing that shows (0.0001).
"""
LESS = 0.01
"""By how much the share of equal tokens, where 16 bits is sure of one, may be below the base's."""
SURE = 0.5
ENOUGH = 50
"""Positions that 16 bits is sure of, without which nothing is said."""
BASE = "base"


def judge_quality(results: dict[str, Row], work: Path) -> list[Row]:
    """Judge every way of serving both models; the damaged tree has to fail the same judge."""
    rows = []
    for model in MODELS:
        reference = _logits(results, f"{model}-{SIXTEEN_BIT}", work)
        numbers = {
            way: compared(reference, found) if _both(reference, found) else {}
            for way in VARIANTS
            for found in [_logits(results, f"{model}-{way}", work)]
            if way != SIXTEEN_BIT
        }
        rows += [row(model, way, own, numbers[BASE]) for way, own in numbers.items()]
    return rows


def row(model: str, way: str, own: dict[str, Any], base: dict[str, Any]) -> Row:
    """Return the line of one way of serving, by its numbers and those of the INT4 base."""
    name = f"{model}-{way}"
    near = bool(own and base) and is_near(own, base, FARTHER[model])
    claim = f"{name}: as near to the model in 16 bits as the INT4 base"
    if way == BASE:
        claim = f"{name}: how far the INT4 base is from 16 bits"
    if way == "wrong-scale":
        claim, near = f"{name}: seen by the same judge", bool(own and base) and not near
    passed = None if way == BASE and own else near  # the measure of the others, and no claim
    return {"claim": claim, "passed": passed, "cases": [name], "numbers": own}


def compared(reference: torch.Tensor, found: torch.Tensor) -> dict[str, Any]:
    """Return divergence KL(16 bits || found) over all positions, and agreement of the top token."""
    one, two = reference.double().log_softmax(-1), found.double().log_softmax(-1)
    each = (one.exp() * (one - two)).sum(-1)
    sure = one.max(-1).values.exp() > SURE
    same = one.argmax(-1) == two.argmax(-1)
    return {
        "positions": len(each),
        "divergence_mean": round(float(each.mean()), 6),
        "divergence_p99": round(float(each.quantile(0.99)), 5),
        "divergence_most": round(float(each.max()), 4),
        "top_agrees": round(float(same.double().mean()), 5),
        "sure_positions": int(sure.sum()),
        "top_agrees_where_sure": round(float(same[sure].double().mean()), 5),
    }


def is_near(own: dict[str, Any], base: dict[str, Any], farther: float) -> bool:
    """Tell whether a way of serving is about as far from 16 bits as the base that it is made of."""
    agrees = own["top_agrees_where_sure"] >= base["top_agrees_where_sure"] - LESS
    near = own["divergence_mean"] <= base["divergence_mean"] + farther
    return bool(own["sure_positions"] >= ENOUGH and agrees and near)


def _both(reference: torch.Tensor | None, found: torch.Tensor | None) -> bool:
    return reference is not None and found is not None and reference.shape == found.shape


def _logits(results: dict[str, Row], name: str, work: Path) -> Any:
    if results.get(name, {}).get("state") != "ran":
        return None
    return torch.load(work / f"{name}.pt", weights_only=True)["logits"]
