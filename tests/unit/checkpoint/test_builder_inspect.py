import json
import re

import pytest
from builder_shards import Raw, write_shard
from builder_trees import BASE_COMMIT, run_tool
from spark_checkpoint import ValidationError
from spark_checkpoint.__main__ import read_build_plan
from spark_checkpoint.build.source_checks import match_plan_names
from spark_checkpoint.inspection import open_checkpoint
from spark_contract.fetching import TransferOptions


def inspect(*arguments):
    return json.loads(run_tool("inspect", *arguments, "--json").stdout)


def compare_with_plan(workshop, directory):
    checkpoint = open_checkpoint(str(directory), None, TransferOptions(), (), ())
    try:
        plan = read_build_plan(workshop.root / "plan.json")
        return True, match_plan_names(checkpoint, plan)
    except ValidationError as error:
        return False, str(error)


def test_reports_tensors_of_base_by_group(workshop):
    workshop.write_base()
    data = inspect(workshop.base_dir)
    tensors = {**workshop.base, **workshop.mtp}
    groups = {(row["group"], row["dtype"]): row["tensors"] for row in data["groups"]}
    assert data["recipe"] == "INT4 base, quant_method auto-round"
    assert data["tensors"] == len(tensors)
    assert data["mtp_tensors"] == len(workshop.mtp)
    assert data["unique_bytes"] == sum(len(raw.data) for raw in tensors.values())
    assert groups["shared experts", "BF16"] == 12
    assert groups["routed experts", "I32"] == 4 * 2 * 3 * 2
    assert (data["layers"], data["experts"], data["hidden"]) == (4, 2, 256)
    assert data["model"] == "qwen3_5_moe"
    text = run_tool("inspect", workshop.base_dir).stdout
    assert "INT4 base" in text
    assert "in several shards" not in text


def test_inspect_reports_contradictory_repositories_without_failing(workshop):
    workshop.donor.pop(f"{workshop.modules[0]}.weight_scale_inv")
    workshop.write_donor()
    workshop.write_base(index_mtp=False)
    assert "mtp.layers.{N}" in inspect(workshop.base_dir)["unindexed"]
    assert inspect(workshop.donor_dir)["fp8_weights_without_scales"].startswith("1 x")


INT8_HEAD = {"head": "int8-g128"}
KEEP = {"shared_experts": "keep", **INT8_HEAD}
UP = "model.language_model.layers.0.mlp.shared_expert.up_proj"
FULL, OVERLAY = "hybrid, full layout", "hybrid, overlay layout"
RESULTS = {
    "v2": ({"layout": "full"}, FULL, "lm_head.weight"),
    "v2, overlay": ({"layout": "overlay"}, OVERLAY, f"{UP}.weight_scale_inv_fp8"),
    "v2, INT8 head": ({"layout": "full", **INT8_HEAD}, FULL, "lm_head.qzeros"),
    "v2, INT8 head, overlay": ({"layout": "overlay", **INT8_HEAD}, OVERLAY, "lm_head.qzeros_int8"),
    "v2-native": (
        {"layout": "full", "shared_experts": "int8-g128"},
        "INT4 with INT8 shared experts",
        f"{UP}.qzeros",
    ),
    "INT8 head": ({"layout": "full", **KEEP}, "INT4 base", "lm_head.scales"),
    "INT8 head, overlay": ({"layout": "overlay", **KEEP}, OVERLAY, "lm_head.qweight_int8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RESULTS)
def test_inspect_recognizes_built_checkpoints_and_missing_tensors(workshop, case):
    changes, kind, removed = RESULTS[case]
    workshop.build(**changes)
    assert inspect(workshop.out)["recipe"].startswith(kind)
    fits, message = compare_with_plan(workshop, workshop.out)
    assert fits, message
    assert "with the names in the plan" in message
    path = workshop.out / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    document["weight_map"].pop(removed)
    path.write_text(json.dumps(document))
    fits, message = compare_with_plan(workshop, workshop.out)
    assert not fits
    assert f"missing 1 (1 x {re.sub('[0-9]+', '{N}', removed)}" in message


@pytest.mark.slow
def test_inspect_compares_sources_with_a_plan(workshop):
    workshop.build()
    assert compare_with_plan(workshop, workshop.base_dir) == (True, "the plan's base")
    assert not compare_with_plan(workshop, workshop.donor_dir)[0]


@pytest.mark.slow
def test_reports_an_indexed_tensor_missing_from_its_shard(workshop):
    workshop.build(layout="full")
    index = workshop.out / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    owner = document["weight_map"]["lm_head.weight"]
    others = {shard for shard in document["weight_map"].values() if shard != owner}
    document["weight_map"]["lm_head.weight"] = min(others)
    index.write_text(json.dumps(document))
    fits, message = compare_with_plan(workshop, workshop.out)
    assert not fits
    assert "missing 1 (1 x lm_head.weight)" in message


@pytest.fixture
def repository(workshop, hub):
    return workshop.publish_base(hub, "lab/tiny", "main")


@pytest.mark.parametrize("siblings", [None, ["a"], "a", [{"rfilename": 1}], {}])
def test_rejects_hub_response_without_file_list(hub, repository, siblings):
    repository[1](siblings)
    done = run_tool("inspect", "lab/tiny", "--endpoint", hub.url, check=False)
    assert done.returncode == 3
    assert "contains no valid list of files" in done.stderr


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not valid JSON"),
        ("[]", "has no weight_map"),
        ('{"metadata": {"weight_map": {"a": "x"}}}', "has no weight_map"),
        ('{"metadata": {"weight_map": {"a": "x"}}, "weight_map": NaN}', "has no weight_map"),
        ('{"weight_map": [1]}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {"a": "x"}', "is not valid JSON"),
        ('{"weight_map": {"a": "x",}}', "is not valid JSON"),
        ('{"weight_map": {"a": "x"}} {}', "is not valid JSON"),
        ('{"weight_map": {"a": "x"},}', "is not valid JSON"),
        ('{"weight_map": {"a" "x"}}', "is not valid JSON"),
        ("{" + '"a":' * 9 + "1", "is not valid JSON"),
        ('{"weight_map": {"a": "x"}, "a": ' + "[" * 100_000, "is not valid JSON"),
        ('{"weight_map": {"\udcff": "x"}}', "is not valid JSON"),
        ('{"a": ' + "[" * 100_000, "is not valid JSON"),
    ],
)
def test_rejects_repository_with_invalid_index(hub, repository, text, problem):
    index = repository[0] / "model.safetensors.index.json"
    index.write_bytes(text.encode("utf-8", "surrogatepass"))
    done = run_tool("inspect", "lab/tiny", "--endpoint", hub.url, check=False)
    assert done.returncode == 3
    assert problem in done.stderr


def test_reads_only_the_headers_of_a_repository(workshop, hub, repository):
    data = inspect("lab/tiny", "--endpoint", hub.url)
    assert data["source"] == f"lab/tiny@{BASE_COMMIT}"
    assert data["tensors"] == data["index"] == len(workshop.base) + len(workshop.mtp)
    shards = repository[0].glob("*.safetensors")
    lengths = [8 + int.from_bytes(path.read_bytes()[:8], "little") for path in shards]
    assert hub.sent[206] == sum(lengths)


def test_rejects_missing_directory():
    assert run_tool("inspect", "/nowhere", check=False).returncode == 2


ROUTED = "model.language_model.layers.0.mlp.experts.0.up_proj"
FP8_PART, BF16_PART = Raw("F8_E4M3", (4,), bytes(4)), Raw("BF16", (4,), bytes(8))


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [
        ("FP8 donor", {UP: FP8_PART, ROUTED: FP8_PART}),
        ("BF16 original", {UP: BF16_PART, ROUTED: BF16_PART}),
        ("unknown", {UP: FP8_PART}),
    ],
)
def test_inspect_derives_the_recipe_from_the_dtypes_of_the_experts(tmp_path, kind, tensors):
    named = {f"{module}.weight": raw for module, raw in tensors.items()}
    write_shard(tmp_path / "model.safetensors", named)
    assert inspect(tmp_path)["recipe"] == kind
