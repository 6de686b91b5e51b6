"""The recall proofs as tests: a model that looks things up, trained here or given.

``SPARK_RECALL_WEIGHTS`` names what ``proofs.recall.training`` wrote; left out, it is trained first,
which takes about five minutes.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from proofs.recall import run, trees, verdicts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def recall_trees(shared_directory: Path) -> Path:
    """The recall model's checkpoints, made once for all processes of a run."""
    out, done = shared_directory / "recall-trees", shared_directory / "recall.done"
    with (shared_directory / "recall.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            given = os.environ.get("SPARK_RECALL_WEIGHTS")
            weights = Path(given) if given else shared_directory / "recall-weights"
            if not given:
                command = [sys.executable, "-m", "proofs.recall.training", str(weights)]
                subprocess.run(command, cwd=ROOT, check=True)
            trees.make(trees.read_weights(weights), out)
            done.touch()
    return out


@pytest.fixture
def recall_work(shared_directory: Path) -> Path:
    """Runs of single engines; the stages share the reference."""
    return shared_directory / "recall-work"


@pytest.mark.parametrize("stage", [*verdicts.JUDGES])
def test_what_stands_in_a_context_is_found_again(
    stage: str, recall_trees: Path, recall_work: Path, results: Path
) -> None:
    if stage.startswith("flashinfer"):
        pytest.importorskip("flashinfer", reason="needs FlashInfer")
    within_s = float(os.environ.get("SPARK_GPU_WITHIN_S", "inf"))
    wanted = [stage] if stage == "recall" else ["recall", stage]
    only = None if stage == "recall" else ["recall-16bit", *run.names(stage)]
    rows = run.prove(
        wanted, recall_trees, recall_work, results, at_once=8, within_s=within_s, only=only
    )
    assert [row for row in rows if row["passed"] is False] == []
