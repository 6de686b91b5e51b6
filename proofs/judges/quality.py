"""Judge the distance of served logits from the same model in 16 bits."""

from pathlib import Path
from typing import Any

import torch

from proofs.engine.profile_cases import MODELS, SIXTEEN_BIT, VARIANTS
from proofs.judges.answers import Row, row

FARTHER = {"tiny": 0.02, "recall": 0.002}
"""Allowed mean divergence above that of the INT4 base, in nats.

FP8 activations cost the lab's model 0.01, the recall model 0.0001.
"""
LESS = 0.01
SURE = 0.5
ENOUGH = 50
BASE = "base"


def judge_quality(results: dict[str, Row], work: Path) -> list[Row]:
    rows = []
    for model in MODELS:
        reference = _load_logits(results, f"{model}-{SIXTEEN_BIT}", work)
        numbers: dict[str, dict[str, Any]] = {}
        for variant in [name for name in VARIANTS if name != SIXTEEN_BIT]:
            logits = _load_logits(results, f"{model}-{variant}", work)
            missing = reference is None or logits is None or reference.shape != logits.shape
            numbers[variant] = {} if missing else compare_logits(reference, logits)
        rows += [
            judge_variant(model, variant, own, numbers[BASE]) for variant, own in numbers.items()
        ]
    return rows


def judge_variant(model: str, variant: str, own: dict[str, Any], base: dict[str, Any]) -> Row:
    name = f"{model}-{variant}"
    near = bool(own and base) and is_near(own, base, FARTHER[model])
    claim = f"{name}: where 16 bits are sure, it agrees as the INT4 base does; divergence in limits"
    if variant == BASE:
        claim = f"{name}: how far the INT4 base is from 16 bits"
    if variant == "wrong-scale":
        claim, near = f"{name}: detected by the same judge", bool(own and base) and not near
    passed = None if variant == BASE and own else near
    return row(claim, passed, [name, f"{model}-{SIXTEEN_BIT}"], **own)


def compare_logits(reference: torch.Tensor, logits: torch.Tensor) -> dict[str, Any]:
    """Return divergence KL(16 bits || found) over all positions, and agreement of the top token."""
    log_p, log_q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    each = (log_p.exp() * (log_p - log_q)).sum(-1)
    sure = log_p.max(-1).values.exp() > SURE
    same = log_p.argmax(-1) == log_q.argmax(-1)
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
    agrees = own["top_agrees_where_sure"] >= base["top_agrees_where_sure"] - LESS
    near = own["divergence_mean"] <= base["divergence_mean"] + farther
    return bool(own["sure_positions"] >= ENOUGH and agrees and near)


def _load_logits(results: dict[str, Row], name: str, work: Path) -> Any:
    if results.get(name, {}).get("state") != "ran":
        return None
    return torch.load(work / f"{name}.pt", weights_only=True)["logits"]
