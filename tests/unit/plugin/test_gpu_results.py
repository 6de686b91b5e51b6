"""The committed answers of GPU runs, held against the limits of the judge that runs beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proofs.judges.answers import TRAINED_NOISE, TURBOQUANT_NOISE, same

RESULTS = Path(__file__).parents[3] / "proofs/results/gpu"
TRAINED = ("engine-speculation", "engine-profiles", "engine-0.30.0", "engine-0.32.0")
STOCK = "tq-stock-full-mtp2: "


def compared(name: str) -> dict[str, dict[str, Any]]:
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return {row["claim"]: row["numbers"] for row in rows if "largest_noise" in row["numbers"]}


@pytest.mark.parametrize("name", TRAINED)
def test_no_way_to_compute_the_trained_model_moves_its_answers_by_more_than_noise(
    name: str,
) -> None:
    comparisons = compared(name)
    assert len(comparisons) >= 6
    assert [
        claim for claim, numbers in comparisons.items() if not same(numbers, TRAINED_NOISE)
    ] == []


def test_our_turboquant_backend_answers_as_one_sequence_alone_and_the_engines_own_does_not() -> (
    None
):
    comparisons = compared("engine-turboquant")
    own = {claim: numbers for claim, numbers in comparisons.items() if "-stock" not in claim}
    (stock,) = [numbers for claim, numbers in comparisons.items() if claim.startswith(STOCK)]

    assert len(own) >= 6
    assert all(same(numbers, TURBOQUANT_NOISE) for numbers in own.values())
    assert not same(stock, TURBOQUANT_NOISE)
    accepted = [numbers["acceptance"] for numbers in own.values() if numbers["acceptance"]]
    assert stock["acceptance"] < min(accepted) - 0.04
