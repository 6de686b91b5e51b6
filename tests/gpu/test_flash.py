from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from proofs.flash import model, served, stages

PLAN = Path(__file__).resolve().parents[2] / "build" / "plans" / "flash-nvme.json"


def _failed(rows):
    return [row["claim"] for row in rows if row["passed"] is False]


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_flash_next_reads_its_ngram_table_from_a_file(tmp_path, results, tensor_parallel):
    if tensor_parallel and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    trees = tmp_path / "trees"
    model.make(trees, 512 if tensor_parallel else 256)
    stage = "flash-next-tp2" if tensor_parallel else "flash-next"
    assert _failed(stages.prove(stage, trees, tmp_path / "work", results)) == []


def test_flash_next_drafts_do_not_change_the_distribution_of_sampled_answers(tmp_path, results):
    trees = tmp_path / "trees"
    model.make(trees)
    rows = stages.prove("flash-next-sampling", trees, tmp_path / "work", results)
    assert _failed(rows) == []


def test_flash_next_answers_are_identical_with_and_without_prefix_hits(tmp_path, results):
    trees = tmp_path / "trees"
    model.make(trees)
    rows = stages.prove("flash-next-prefixes", trees, tmp_path / "work", results)
    assert _failed(rows) == []


@pytest.mark.skipif(not PLAN.exists(), reason="needs plans: `make gpu-plans`")
def test_flash_next_serves_over_http(tmp_path, results):
    trees = tmp_path / "trees"
    served.make(trees)
    out = results / "serve-flash-nvme.json"
    assert _failed(served.prove(trees, tmp_path / "work", out, PLAN)) == []
