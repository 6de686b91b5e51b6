import importlib
import json
import pkgutil

import pytest
from spark_contract import documents
from spark_contract.builder_api import BuildPlan

import proofs
from proofs.serve import long
from proofs.trees import build
from spark_deploy.config.checkout import CHECKOUT

GPU_PACKAGES = ("torch", "transformers", "vllm")
MODULES = sorted(module.name for module in pkgutil.walk_packages(proofs.__path__, "proofs."))


def test_every_proofs_module_can_be_imported():
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in GPU_PACKAGES:
                raise


def test_watchdog_verdict_on_recorded_long_prompts_is_unchanged():
    kept = json.loads((CHECKOUT / "proofs/results/gpu/serve-v2-long.json").read_text())
    rows = long.judge(kept, "v2")
    for row, recorded in zip(rows, kept["rows"], strict=True):
        assert (row["passed"], row["numbers"]) == (recorded["passed"], recorded["numbers"])
    alone, _ = rows
    assert alone["numbers"]["stalled_by_tokens_alone"]


@pytest.mark.parametrize("name", build.VARIANTS)
def test_builder_accepts_the_build_plan_of_each_proof_variant(name, monkeypatch, tmp_path):
    module = "model.layers.0.mlp.shared_expert.up_proj.weight"
    monkeypatch.setattr(build, "names_of", lambda _: {module, "mtp.norm.weight"})
    plan = build.plan(tmp_path / "base", tmp_path / "donor", tmp_path / "out", build.VARIANTS[name])
    read = documents.read(BuildPlan, plan)
    assert read.swap == (module.removesuffix(".weight"),)
    assert read.mtp_tensors == ("mtp.norm.weight",)
