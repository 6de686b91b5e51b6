import json

import pytest

from spark_deploy.config.checkout import CHECKOUT

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
def test_recorded_recall_results_pass_and_detect_damaged_engines(name):
    path = CHECKOUT / f"proofs/results/gpu/{name}.json"
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert [row["claim"] for row in rows if row["passed"] is False] == []
    marks = ("damage", "noise", "fi-gdn-states")
    damaged = [row for row in rows if row["passed"] and any(mark in row["claim"] for mark in marks)]
    assert len(damaged) == DAMAGED[name]
