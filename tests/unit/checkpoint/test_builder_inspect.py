"""What inspect says of trees and repositories."""

import json
import re

import pytest
import yaml
from builder_trees import BASE_COMMIT, ROOT, run_tool
from spark_checkpoint import inspection as anatomy
from spark_checkpoint.headers import Header, Tensor
from spark_checkpoint.inspection import examine, name_recipe
from spark_contract.orders import expand_all


def inspected(*arguments):
    return json.loads(run_tool("inspect", *arguments, "--json").stdout)


def row(data, group, dtype):
    return next(r for r in data["groups"] if (r["group"], r["dtype"]) == (group, dtype))


def test_a_base_is_described_group_by_group(workshop):
    workshop.write_base()
    data = inspected(workshop.base_dir)
    assert data["recipe"] == "INT4 base, quant_method auto-round"
    assert data["tensors"] == len(workshop.base) + len(workshop.mtp)
    assert data["mtp_tensors"] == len(workshop.mtp)
    assert data["unique_bytes"] == sum(
        len(raw.data) for raw in (*workshop.base.values(), *workshop.mtp.values())
    )
    assert row(data, "shared experts", "BF16")["tensors"] == 12
    assert row(data, "routed experts", "I32")["tensors"] == 4 * 2 * 3 * 2
    assert (data["layers"], data["experts"], data["hidden"]) == (4, 2, 256)
    assert data["model"] == "qwen3_5_moe"
    text = run_tool("inspect", workshop.base_dir).stdout
    assert "INT4 base" in text
    assert "in several shards" not in text


def test_donor_and_results_are_told_apart(workshop):
    workshop.write_base()
    workshop.write_donor()
    kinds = {inspected(workshop.donor_dir)["recipe"].split(",")[0]}
    for number, changes in enumerate(
        [
            {"layout": "overlay"},
            {"layout": "full"},
            {"layout": "full", "shared_experts": "int8-g128", "head": "int8-g128"},
        ]
    ):
        out = workshop.out.with_name(f"out-{number}")
        workshop.build(out=str(out), **changes)
        kinds.add(inspected(out)["recipe"].rsplit(", quant", 1)[0])
    assert kinds == {
        "unknown",
        "hybrid, overlay layout (needs the plugin)",
        "hybrid, full layout (needs the plugin)",
        "INT4 with INT8 shared experts (plain auto-round, no plugin)",
    }


def test_what_is_wrong_with_a_tree_is_said_and_not_refused(workshop):
    workshop.donor.pop(f"{workshop.modules[0]}.weight_scale_inv")
    workshop.write_donor()
    workshop.write_base(index_mtp=False)
    text = run_tool("inspect", workshop.base_dir).stdout
    assert "in a shard but not in the index: the engine may skip the file: " in text
    assert "mtp.layers.{N}" in text
    text = run_tool("inspect", workshop.donor_dir).stdout
    assert "FP8 weights without block scales: 1 x" in text


@pytest.mark.parametrize("layout", ["overlay", "full"])
def test_a_tree_is_held_against_a_plan(workshop, layout):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout=layout)
    plan = workshop.root / "plan.json"
    done = run_tool("inspect", workshop.base_dir, "--plan", plan)
    assert "the plan's base" in done.stderr
    done = run_tool("inspect", workshop.out, "--plan", plan)
    assert "a hybrid with exactly the plan's names" in done.stderr
    done = run_tool("inspect", workshop.donor_dir, "--plan", plan, check=False)
    assert done.returncode == 3


# Plans whose results have other names than the base.
RESULTS = {
    "v2": {"layout": "full"},
    "v2 as overlay": {"layout": "overlay"},
    "v2 with INT8 head": {"layout": "full", "head": "int8-g128"},
    "v2 with INT8 head as overlay": {"layout": "overlay", "head": "int8-g128"},
    "v2-native": {"layout": "full", "shared_experts": "int8-g128"},
    "INT8 head alone": {"layout": "full", "shared_experts": "keep", "head": "int8-g128"},
    "INT8 head alone as overlay": {
        "layout": "overlay",
        "shared_experts": "keep",
        "head": "int8-g128",
    },
}
# The name each of them then loses.
LOST = {
    "v2": "lm_head.weight",
    "v2 as overlay": "model.language_model.layers.0.mlp.shared_expert.up_proj.weight_scale_inv_fp8",
    "v2 with INT8 head": "lm_head.qzeros",
    "v2 with INT8 head as overlay": "lm_head.qzeros_int8",
    "v2-native": "model.language_model.layers.0.mlp.shared_expert.up_proj.qzeros",
    "INT8 head alone": "lm_head.scales",
    "INT8 head alone as overlay": "lm_head.qweight_int8",
}


def held_against_the_plan(workshop):
    plan = workshop.root / "plan.json"
    return run_tool("inspect", workshop.out, "--plan", plan, check=False)


@pytest.mark.parametrize("kind", RESULTS)
def test_every_result_is_its_plans_and_none_that_lost_a_name(workshop, kind):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(**RESULTS[kind])
    done = held_against_the_plan(workshop)
    assert done.returncode == 0, done.stderr
    assert "with exactly the plan's names" in done.stderr
    index = workshop.out / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"].pop(LOST[kind])
    index.write_text(json.dumps(document))
    done = held_against_the_plan(workshop)
    assert done.returncode == 3
    assert f"missing 1 (1 x {re.sub('[0-9]+', '{N}', LOST[kind])}" in done.stderr


def test_a_name_the_index_has_and_no_shard_holds_is_missing(workshop):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout="full")
    index = workshop.out / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    owner = document["weight_map"]["lm_head.weight"]
    others = {shard for shard in document["weight_map"].values() if shard != owner}
    document["weight_map"]["lm_head.weight"] = sorted(others)[0]
    index.write_text(json.dumps(document))
    done = held_against_the_plan(workshop)
    assert done.returncode == 3
    assert "missing 1 (1 x lm_head.weight)" in done.stderr


@pytest.fixture
def repository(workshop, hub):
    """Return a directory the hub serves as lab/tiny, and a way to change what it lists."""
    workshop.write_base()
    tree = hub.root / "lab/tiny/resolve" / BASE_COMMIT
    tree.parent.mkdir(parents=True)
    workshop.base_dir.rename(tree)
    api = hub.root / "api/models/lab/tiny/revision"
    api.mkdir(parents=True)

    def lists(siblings):
        (api / "main").write_text(json.dumps({"sha": BASE_COMMIT, "siblings": siblings}))

    lists([{"rfilename": path.name} for path in tree.iterdir()])
    return tree, lists


@pytest.mark.parametrize("siblings", [None, ["a"], "a", [{"rfilename": 1}], {}])
def test_a_hub_that_lists_no_files_is_refused(hub, repository, siblings):
    repository[1](siblings)
    done = run_tool("inspect", "lab/tiny", "--endpoint", hub.url, check=False)
    assert done.returncode == 3
    assert "has no list of files in the hub's answer; fix: " in done.stderr


@pytest.mark.parametrize("names", [[1], None, {"a": 1}, "a"])
def test_an_index_of_a_repository_that_maps_no_names_to_files_is_refused(hub, repository, names):
    index = repository[0] / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    done = run_tool("inspect", "lab/tiny", "--endpoint", hub.url, check=False)
    assert done.returncode == 3
    assert "has no weight_map of names to files; fix: " in done.stderr


def test_a_repository_is_read_by_its_headers(workshop, hub, repository):
    data = inspected("lab/tiny", "--endpoint", hub.url)
    assert data["place"] == f"lab/tiny@{BASE_COMMIT}"
    assert data["tensors"] == len(workshop.base) + len(workshop.mtp)
    assert data["index"] == data["tensors"]
    asked = [h["Range"] for p, h, _ in hub.requests if p.endswith(".safetensors")]
    assert {wanted.split("-")[0] for wanted in asked} == {"bytes=0", "bytes=8"}
    paths = repository[0].glob("*.safetensors")
    assert hub.sent[206] == sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little") for path in paths
    )


def test_what_is_neither_directory_nor_repository_is_refused():
    done = run_tool("inspect", "/nowhere", check=False)
    assert done.returncode == 2
    assert "neither a directory nor org/name" in done.stderr


# --- which recipe: synthetic headers of a catalog's architecture ---------------------------------

CATALOG = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / "tests/fixtures/checkout/catalog/models").glob("*.yml"))
    if "based_on" not in path.read_text()
}
DTYPES = {".qweight": "I32", ".qzeros": "I32", ".scales": "F16"}


def sizes(model):
    return tuple(CATALOG[model]["architecture"][key] for key in ("layers", "experts", "hidden"))


def headers(names, model, fp8=()):
    """Return what examine takes: one shard of the names, with dtypes their suffixes tell."""
    tensors = {}
    for name in names:
        dtype = "F8_E4M3" if name in fp8 else DTYPES.get(name[name.rindex(".") :], "BF16")
        tensors[name] = Tensor(dtype, (sizes(model)[2],), 0, 2)
    return {"model.safetensors": Header(tensors, {}, 8, 2)}


def described(names, model, method, fp8=()):
    found = examine(headers(names, model, fp8), None)
    return found, name_recipe(found, method, frozenset({"model.safetensors"}))


def base_names(model):
    tensors = CATALOG[model]["tensors"]
    return expand_all(tensors["base"]), expand_all(tensors["mtp"])


@pytest.mark.parametrize("model", CATALOG)
def test_an_int4_base_is_recognised_and_measured(model):
    base, mtp = base_names(model)
    # One of nine names of an expert: the rest says nothing more.
    some = {n for n in base if ".mlp.experts." not in n or n.endswith(".up_proj.qweight")}
    found, recipe = described(some | mtp, model, "auto-round")
    assert recipe == "INT4 base, quant_method auto-round"
    assert (found.layers, found.experts, found.hidden) == sizes(model)
    assert found.mtp == len(mtp)


@pytest.mark.parametrize("model", CATALOG)
def test_a_donor_with_its_routed_experts_is_recognised(model):
    swap = expand_all(CATALOG[model]["tensors"]["swap"])
    routed = {
        name.removesuffix(".qweight")
        for name in base_names(model)[0]
        if ".mlp.experts." in name and name.endswith(".up_proj.qweight")
    }
    weights = {f"{module}.weight" for module in swap | routed}
    scales = {f"{module}.weight_scale_inv" for module in swap | routed}
    unmatched = expand_all(CATALOG[model]["tensors"]["donor_unmatched"])
    names = weights | scales | unmatched | {"model.language_model.norm.weight"}
    found, recipe = described(names, model, "fp8", fp8=weights)
    assert recipe == "FP8 donor, quant_method fp8"
    assert (found.layers, found.hidden) == (sizes(model)[0], sizes(model)[2])
    assert anatomy.find_missing_scales(found) == []


def test_what_it_is_follows_from_the_routed_and_the_shared_experts():
    model = "large"
    shared = "model.language_model.layers.0.mlp.shared_expert.up_proj"
    routed = "model.language_model.layers.0.mlp.experts.0.up_proj"
    fp8 = {f"{shared}.weight"}
    kinds = {
        "hybrid, full layout (needs the plugin)": ({f"{routed}.qweight", *fp8}, fp8),
        "INT4 with INT8 shared experts (plain auto-round, no plugin)": (
            {f"{routed}.qweight", f"{shared}.qweight"},
            (),
        ),
        "INT4 base": ({f"{routed}.qweight", *fp8}, ()),
        "BF16 original": ({f"{routed}.weight", *fp8}, ()),
        "unknown": (fp8, fp8),
    }
    for kind, (names, in_fp8) in kinds.items():
        assert described(names, model, None, in_fp8)[1] == kind
