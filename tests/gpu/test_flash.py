import pytest

pytest.importorskip("vllm")

from proofs.flash import model, run


def test_flash_next_reads_its_table_from_a_file(tmp_path, results):
    model.make(tmp_path / "trees")
    rows = run.prove(tmp_path / "trees", tmp_path / "work", results)
    assert [row["claim"] for row in rows if row["passed"] is False] == []
