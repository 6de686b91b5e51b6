import fcntl

import pytest

pytest.importorskip("vllm")

from proofs.recall import cases, run, trees, verdicts
from tests.gpu.conftest import make_once


@pytest.fixture(scope="session")
def recall_trees(recall_weights, shared_directory):
    weights = trees.read_weights(recall_weights)
    return make_once(shared_directory, "recall-trees", lambda out: trees.make(weights, out))


@pytest.fixture
def recall_work(recall_trees, shared_directory):
    work = shared_directory / "recall-work"
    with (shared_directory / "recall.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run.run_cases(cases.recall_cases()[:1], recall_trees, work, at_once=1)
    return work


@pytest.mark.parametrize("stage", [*verdicts.JUDGES])
def test_every_judged_row_passes(stage, recall_trees, recall_work, results):
    if stage.startswith("flashinfer"):
        pytest.importorskip("flashinfer", reason="needs FlashInfer")
    rows = run.prove(stage, recall_trees, recall_work, results, at_once=8)
    assert [row for row in rows if row["passed"] is False] == []
