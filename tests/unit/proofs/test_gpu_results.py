import json

import pytest

from proofs.judges.answers import TRAINED_NOISE, TURBOQUANT_NOISE, answers_agree
from spark_deploy.config.checkout import CHECKOUT

RESULTS = CHECKOUT / "proofs/results/gpu"
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


def test_only_the_plugins_turboquant_keeps_answers_unchanged_in_batches():
    comparisons = compared("engine-turboquant")
    own = {claim: numbers for claim, numbers in comparisons.items() if "-stock" not in claim}
    (stock,) = [numbers for claim, numbers in comparisons.items() if claim.startswith(STOCK)]

    assert len(own) >= 6
    assert all(answers_agree(numbers, TURBOQUANT_NOISE) for numbers in own.values())
    assert not answers_agree(stock, TURBOQUANT_NOISE)
    accepted = [numbers["acceptance"] for numbers in own.values() if numbers["acceptance"]]
    assert stock["acceptance"] < min(accepted) - 0.04


DAMAGED = {
    "recall-recall": 3,
    "recall-prefixes": 3,
    "recall-drafts": 1,
    "recall-sampling": 2,
    "recall-flashinfer": 2,
    "recall-turboquant": 0,
    "recall-wide": 0,
}
"""Number of damaged engines that failed, by result file."""


@pytest.mark.parametrize("name", DAMAGED)
def test_recorded_recall_results_pass_and_damaged_engines_fail(name):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    assert [row["claim"] for row in rows if row["passed"] is False] == []
    marks = ("damage", "noise", "fi-gdn-states")
    damaged = [row for row in rows if row["passed"] and any(mark in row["claim"] for mark in marks)]
    assert len(damaged) == DAMAGED[name]
