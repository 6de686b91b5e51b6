from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from proofs import stages
from proofs.engine.profile_cases import HEAD_TIMINGS_PATH

PARALLEL_ENGINES = {
    "eager": 8,
    "refused": 8,
    "speculation": 6,
    "turboquant": 7,
    "nan": 8,
    "damages": 9,
    "names": 10,
    "steered": 7,
    "profiles": 6,
    "prefixes": 16,
    "sizes": 10,
    "long": 3,
    "head-choice": 3,
    "quality": 8,
    "two-gpus": 3,
}


@pytest.mark.parametrize("stage", PARALLEL_ENGINES)
def test_every_result_row_with_a_verdict_passes(stage, trees, tmp_path, results, request):
    if stage == "two-gpus" and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    if stage == "quality":
        request.getfixturevalue("quality_trees")
    if stage == "head-choice":
        for path in HEAD_TIMINGS_PATH.values():
            Path(path).unlink(missing_ok=True)
    rows = stages.prove(stage, trees, tmp_path, results, at_once=PARALLEL_ENGINES[stage])
    assert [row for row in rows if row["passed"] is False] == []
