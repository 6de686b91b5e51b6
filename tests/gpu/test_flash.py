from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from proofs.flash import model, served, stages

PLAN = Path(__file__).resolve().parents[2] / "build" / "plans" / "flash-nvme.json"


def _failed(rows):
    return [row["claim"] for row in rows if row["passed"] is False]


@pytest.mark.parametrize("stage", stages.STAGES)
def test_flash_next_passes_its_stages(tmp_path, results, stage):
    if stage == "flash-next-tp2" and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    trees = tmp_path / "trees"
    model.make(trees, 512 if stage == "flash-next-tp2" else 256)
    assert _failed(stages.prove(stage, trees, tmp_path / "work", results)) == []


@pytest.mark.skipif(not PLAN.exists(), reason="needs plans: `make gpu-plans`")
def test_flash_next_serves_over_http(tmp_path, results):
    trees = tmp_path / "trees"
    served.make(trees)
    out = results / "serve-flash-nvme.json"
    assert _failed(served.prove(trees, tmp_path / "work", out, PLAN)) == []
