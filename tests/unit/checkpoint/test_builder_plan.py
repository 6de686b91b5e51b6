import pytest
import yaml
from builder_trees import ROOT, changed
from spark_checkpoint.__main__ import read_build_plan
from spark_contract import documents
from spark_contract.builder_api import BuildPlan, expand_all
from spark_contract.documents import DocumentError
from spark_contract.tool import HostToolError

# Published counts: base outside mtp.*, MTP, swapped modules, unmatched donor names.
COUNTS = {
    "qwen3.5-122b": (112_116, 785, 144, 408),
    "qwen3.5-35b": (93_486, 2_329, 120, 344),
    "qwen3.5-397b": (278_301, 1_553, 180, 504),
    "lab-tiny": (423, 41, 12, 56),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", COUNTS)
def test_catalog_patterns_expand_to_the_published_counts(model):
    tensors = yaml.safe_load((ROOT / f"catalog/models/{model}.yml").read_text())["tensors"]
    keys = ("base", "mtp", "swap", "donor_unmatched")
    base, mtp, swap, unmatched = (expand_all(tensors[key]) for key in keys)
    assert tuple(map(len, (base, mtp, swap, unmatched))) == COUNTS[model]
    assert {f"{module}.weight" for module in swap} <= base
    assert all(name.startswith("mtp.") for name in mtp)
    assert not any(name.startswith("mtp.") for name in base)
    assert not unmatched & base
    assert not any(".mlp.experts." in name for name in unmatched)
    assert tensors["block_shape"] == [128, 128]
    assert base.isdisjoint(f"{module}.weight_scale_inv" for module in swap)


BROKEN = [
    (["digest"], None),
    (["digest"], "x"),
    (["digest"], "1" * 64 + "\n"),
    (["schema_version"], 2),
    (["base", "dir"], "relative"),
    (["base", "revision"], "main"),
    (["donor"], {"url": "https://h/r/resolve/main"}),
    (["donor"], {}),
    (["donor"], {"dir": "/a", "url": "https://h/r/resolve/" + "0" * 40}),
    (["block_shape"], [128]),
    (["block_shape"], [128, 0]),
    (["swap"], "a string"),
    (["swap"], ["a.{0..3}.weight"]),
    (["head"], "int4"),
    (["layout"], "both"),
    (["shared_experts"], "fp8"),
    (["name"], ""),
    (["typo"], 1),
]


@pytest.mark.parametrize(("path", "value"), BROKEN)
def test_rejects_invalid_plan(workshop, path, value):
    documents.read(BuildPlan, workshop.plan())
    with pytest.raises(DocumentError):
        documents.read(BuildPlan, changed(workshop.plan(), path, value))


def test_build_plan_is_read_back_unchanged(workshop):
    plan = documents.read(BuildPlan, workshop.plan())
    assert documents.to_plain(plan) == workshop.plan()
    assert documents.parse(BuildPlan, documents.to_json(plan)) == plan


def test_rejects_plan_with_different_recipe_version(workshop):
    with pytest.raises(HostToolError, match="requires recipe version 999"):
        read_build_plan(workshop.write_plan(recipe_version=999))
