"""Releases of plans, served over HTTP: two hosts as one, plain repositories, a model that sees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from proofs.releases import run, trees

PLANS = Path(__file__).resolve().parents[2] / "build" / "plans"
RECALL, EYES = (os.environ.get(f"SPARK_GPU_{name}") for name in ("RECALL", "EYES"))
"""What ``proofs.recall.training`` and ``proofs.releases.eyes`` wrote."""
WITHIN_S = float(os.environ.get("SPARK_GPU_WITHIN_S", "inf"))
pytestmark = pytest.mark.skipif(
    not (PLANS / "plain-fp8.json").exists(), reason="needs plans: `make gpu-plans`"
)


def _failed(stage: str, made: Path, work: Path, results: Path) -> list[str]:
    rows = run.prove([stage], made, PLANS, work, results, WITHIN_S)
    return [row["claim"] for row in rows if not row["passed"]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.skipif(not RECALL, reason="needs SPARK_GPU_RECALL: weights of the recall model")
def test_two_hosts_answer_as_one(tmp_path: Path, results: Path) -> None:
    made = tmp_path / "trees"
    trees.make_pair(trees.recall_trees.read_weights(Path(str(RECALL))), made)
    assert _failed("cluster", made, tmp_path / "work", results) == []


def test_plain_repositories_draft_and_answer_as_without(tmp_path: Path, results: Path) -> None:
    made = tmp_path / "trees"
    for kind in ("fp8", "bf16"):
        trees.write_plain(made / f"plain-{kind}", kind)
    assert _failed("plain", made, tmp_path / "work", results) == []


@pytest.mark.skipif(not EYES, reason="needs SPARK_GPU_EYES: weights of `proofs.releases.eyes`")
def test_pictures_are_seen_and_a_damaged_tower_is_noticed(tmp_path: Path, results: Path) -> None:
    made = tmp_path / "trees"
    trees.make_seeing(Path(str(EYES)), made)
    trees.damage_eyes(made / "seeing")
    assert _failed("seeing", made, tmp_path / "work", results) == []
