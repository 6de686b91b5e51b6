from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from proofs.releases import run, trees

PLANS = Path(__file__).resolve().parents[2] / "build" / "plans"
pytestmark = pytest.mark.skipif(
    not (PLANS / "plain-fp8.json").exists(), reason="needs plans: `make gpu-plans`"
)


def _failed(stage, checkpoints, work, results):
    rows = run.prove(stage, checkpoints, PLANS, work, results)
    return [row["claim"] for row in rows if not row["passed"]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_two_hosts_give_the_same_answers_as_one_host(recall_weights, tmp_path, results):
    checkpoints = tmp_path / "trees"
    trees.make_pair(trees.recall_trees.read_weights(recall_weights), checkpoints)
    assert _failed("cluster", checkpoints, tmp_path / "work", results) == []


def test_drafts_from_plain_repositories_do_not_change_any_answer(tmp_path, results):
    checkpoints = tmp_path / "trees"
    for kind in ("fp8", "bf16"):
        trees.write_plain(checkpoints / f"plain-{kind}", kind)
    assert _failed("plain", checkpoints, tmp_path / "work", results) == []


def test_images_are_recognized_and_damaged_vision_towers_are_detected(eyes, tmp_path, results):
    checkpoints = tmp_path / "trees"
    trees.make_seeing(eyes, checkpoints)
    trees.damage_eyes(checkpoints / "seeing")
    assert _failed("seeing", checkpoints, tmp_path / "work", results) == []
