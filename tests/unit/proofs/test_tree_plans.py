"""Checkpoints of the proofs are built from plans that the builder reads."""

from pathlib import Path

import pytest
from spark_contract import documents
from spark_contract.orders import BuildPlan

build = pytest.importorskip("proofs.trees.build", reason="needs numpy")


@pytest.mark.parametrize("name", build.VARIANTS)
def test_the_builder_reads_the_plan_of_each_variant(name: str, monkeypatch, tmp_path: Path) -> None:
    module = "model.layers.0.mlp.shared_expert.up_proj.weight"
    monkeypatch.setattr(build, "names_of", lambda _: {module, "mtp.norm.weight"})
    plan = build.plan(tmp_path / "base", tmp_path / "donor", tmp_path / "out", build.VARIANTS[name])
    read = documents.read(BuildPlan, plan)
    assert read.swap == (module.removesuffix(".weight"),)
    assert read.mtp_tensors == ("mtp.norm.weight",)
