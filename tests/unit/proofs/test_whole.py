"""The full-size checkpoints: names of the catalog, accepted by the builder."""

from dataclasses import asdict

import pytest
from spark_contract.builder_api import expand_all

from lab.model import original
from proofs.releases.planning import slice_model
from proofs.trees import build
from proofs.trees.special import HYBRID
from proofs.whole import trees
from proofs.whole.cases import to_options
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.plan.memory import weight_sizes

SMALL = {
    **{"hidden": 256, "vocabulary": 1024, "expert_width": 128, "shared_expert_width": 256},
    **{"attention_heads": 2, "kv_heads": 1, "head_width": 128},
    "linear_attention": {"key_heads": 2, "value_heads": 8, "head_width": 64},
}
ARGUMENTS = [
    *("/model", "--served-model-name", "m", "--max-model-len", "4096"),
    *("--no-enable-prefix-caching", "--language-model-only", "--load-format", "auto"),
    *("--speculative-config", '{"method":"mtp"}', "--uds", "/run/engine.sock"),
]


@pytest.mark.parametrize("name", ["qwen3.5-35b", "qwen3.5-122b"])
def test_full_size_tree_matches_tensor_count_and_size_in_the_catalog(name):
    model = read_catalog().model(name)
    shape = trees.shape_of(asdict(model.architecture))
    sizes = {**original.main_shapes(shape), **original.mtp_shapes(shape)}
    int4_mtp = model.architecture.mtp_scheme == "int4"
    entries = [entry for item in sizes.items() for entry in trees.stored(*item, int4_mtp)]
    tensors = model.tensors
    assert {entry[0] for entry in entries} == expand_all([*tensors.base, *tensors.mtp])
    planned = weight_sizes(model.architecture).tree_bytes
    assert trees.size_of(entries) == pytest.approx(planned, rel=0.01)


@pytest.mark.slow
def test_builder_accepts_the_sliced_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "names_of", lambda _: set())
    monkeypatch.setattr(trees, "VISION", {**trees.VISION, "hidden": 64, "width": 64})
    model = slice_model()
    tensors = model["tensors"]
    plan = build.plain_plan(
        tmp_path, tmp_path, swap=tensors["swap"], donor_unmatched=tensors["donor_unmatched"],
        base_tensors=tensors["base"], mtp_tensors=tensors["mtp"], **HYBRID,
    )  # fmt: skip
    engine = {
        "model": "slice",
        "build": plan,
        "architecture": {**model["architecture"], **SMALL},
        "disk_bytes": 1,
    }
    made = trees.prepare([engine], tmp_path)["slice"]
    counts = tensors["counts"]
    assert made["tensors"] == counts["base"] + counts["mtp"] + counts["swap"] + 2


def test_server_arguments_are_omitted():
    assert to_options(ARGUMENTS) == {
        "max_model_len": 4096,
        "enable_prefix_caching": False,
        "language_model_only": True,
        "load_format": "auto",
        "speculative_config": {"method": "mtp"},
    }
