import pytest

pytest.importorskip("vllm")

import torch

from proofs.flash import model, run


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_flash_next_reads_its_ngram_table_from_a_file(tmp_path, results, tensor_parallel):
    if tensor_parallel and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    trees = tmp_path / "trees"
    model.make(trees, 512 if tensor_parallel else 256)
    rows = run.prove(trees, tmp_path / "work", results, tensor_parallel=tensor_parallel)
    assert [row["claim"] for row in rows if row["passed"] is False] == []
