import json
from pathlib import Path

import pytest

from proofs.judges.answers import TRAINED_NOISE, TURBOQUANT_NOISE, answers_agree

RESULTS = Path(__file__).parents[3] / "proofs/results/gpu"
TRAINED = ("engine-speculation", "engine-profiles", "engine-0.30.0", "engine-0.32.0")
STOCK = "tq-stock-full-mtp2: "


def compared(name):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return {row["claim"]: row["numbers"] for row in rows if "largest_noise" in row["numbers"]}


@pytest.mark.parametrize("name", TRAINED)
def test_answers_of_the_trained_model_differ_only_by_noise(name):
    comparisons = compared(name)
    assert len(comparisons) >= 6
    assert [
        claim for claim, numbers in comparisons.items() if not answers_agree(numbers, TRAINED_NOISE)
    ] == []


def test_only_turboquant_of_the_plugin_gives_the_answers_of_a_single_sequence():
    comparisons = compared("engine-turboquant")
    own = {claim: numbers for claim, numbers in comparisons.items() if "-stock" not in claim}
    (stock,) = [numbers for claim, numbers in comparisons.items() if claim.startswith(STOCK)]

    assert len(own) >= 6
    assert all(answers_agree(numbers, TURBOQUANT_NOISE) for numbers in own.values())
    assert not answers_agree(stock, TURBOQUANT_NOISE)
    accepted = [numbers["acceptance"] for numbers in own.values() if numbers["acceptance"]]
    assert stock["acceptance"] < min(accepted) - 0.04
