from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from proofs.releases import run, trees

PLANS = Path(__file__).resolve().parents[2] / "build" / "plans"
pytestmark = pytest.mark.skipif(
    not (PLANS / "plain-fp8.json").exists(), reason="needs plans: `make gpu-plans`"
)


def _failed(stage, made, work, results):
    rows = run.prove(stage, made, PLANS, work, results)
    return [row["claim"] for row in rows if not row["passed"]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_two_hosts_give_the_same_answers_as_one_host(recall_weights, tmp_path, results):
    made = tmp_path / "trees"
    trees.make_pair(trees.recall_trees.read_weights(recall_weights), made)
    assert _failed("cluster", made, tmp_path / "work", results) == []


def test_drafts_of_plain_repositories_change_no_answer(tmp_path, results):
    made = tmp_path / "trees"
    for kind in ("fp8", "bf16"):
        trees.write_plain(made / f"plain-{kind}", kind)
    assert _failed("plain", made, tmp_path / "work", results) == []


def test_images_are_recognized_and_damaged_vision_towers_are_detected(eyes, tmp_path, results):
    made = tmp_path / "trees"
    trees.make_seeing(eyes, made)
    trees.damage_eyes(made / "seeing")
    assert _failed("seeing", made, tmp_path / "work", results) == []
