import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from builder_judge import LAYOUTS, MODULE
from builder_shards import Raw, readable_by_safetensors, write_shard_by_hand
from builder_trees import (
    BASE_COMMIT,
    VOCABULARY,
    Workshop,
    file_entries,
    run_tool,
    tool_environment,
)
from spark_checkpoint import ReceiptMismatchError
from spark_checkpoint.__main__ import read_build_plan
from spark_checkpoint.build import build as building
from spark_checkpoint.build import layouts
from spark_checkpoint.progress import Progress
from spark_checkpoint.tensor_sets import overlay_name
from spark_contract.builder_api import RECIPE_VERSION

RECIPES = {
    "overlay": {"layout": "overlay"},
    "overlay, INT8 head": {"layout": "overlay", "head": "int8-g128"},
    "full, INT8 head": {"layout": "full", "head": "int8-g128"},
    "full, own FP8": {"layout": "full", "shared_experts": "fp8-self"},
    "full, INT8 shared experts": {"layout": "full", "shared_experts": "int8-g128"},
    "full, MTP from the donor": {"layout": "full", "graft": True},
}
# When a hash changes on purpose, raise RECIPE_VERSION and add the new hashes: hosts then build
# again instead of reusing an old checkpoint.
GOLDEN = {
    1: {
        "overlay": "b7311533d979fc88",
        "overlay, INT8 head": "8abac8540c6b8637",
        "full, INT8 head": "546562f951550050",
        "full, own FP8": "f23698a2abd57667",
        "full, INT8 shared experts": "d95c53edfaadbab5",
        "full, MTP from the donor": "0f65e5bc76a8087f",
    }
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RECIPES)
def test_build_produces_the_bytes_recorded_for_its_recipe_version(tmp_path, case):
    workshop = Workshop(tmp_path, write_shard=write_shard_by_hand)
    changes = dict(RECIPES[case])
    if changes.pop("graft", False):
        workshop.mtp = {}
    workshop.build(**changes)
    lines = [f"{entry['path']} {entry['sha256']}\n" for entry in file_entries(workshop.out)]
    actual = hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
    if "SPARK_SHOW_GOLDEN" in os.environ:
        pytest.fail(f'"{case}": "{actual}",')
    assert actual == GOLDEN[RECIPE_VERSION][case]


def plain_name(name):
    return name.replace("_scale_inv_fp8", "_scale_inv").replace("weight_fp8", "weight")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_build_changes_only_the_swapped_tensors(workshop, layout):
    workshop.build(layout=layout)
    result = {plain_name(name): raw for name, raw in workshop.result().items()}
    swapped = {
        f"{module}.{suffix}"
        for module in workshop.modules
        for suffix in ("weight", "weight_scale_inv")
    }
    untouched = {**workshop.base, **workshop.mtp}
    assert result.keys() == untouched.keys() | swapped
    for name, raw in result.items():
        assert raw == (workshop.donor if name in swapped else untouched)[name], name
    for shard in set(workshop.index().values()):
        names = readable_by_safetensors(workshop.out / shard)
        assert {name for name, owner in workshop.index().items() if owner == shard} <= names


def test_overlay_links_base_files_and_omits_replaced_names_from_index(workshop):
    workshop.write_sources()
    before = workshop.base_hashes()
    workshop.build(layout="overlay")
    index = workshop.index()
    for module in workshop.modules:
        assert f"{module}.weight" not in index
        assert index[f"{module}.weight_fp8"] == "model-spark-overlay.safetensors"
        assert index[f"{module}.weight_scale_inv_fp8"] == "model-spark-overlay.safetensors"
    for shard in workshop.base_dir.glob("*.safetensors"):
        assert os.path.samefile(shard, workshop.out / shard.name)
    assert workshop.base_hashes() == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_built_config_lists_the_plugin_and_every_fp8_module(workshop, layout):
    workshop.build(layout=layout, extra={"text_config": {"added": 1}})
    quantization = workshop.quantization()
    assert quantization["quant_method"] == "spark_inc"
    assert sorted(quantization["fp8_block"]["modules"]) == workshop.modules
    assert quantization["fp8_block"]["block_shape"] == [128, 128]
    assert quantization["spark"] == {"layout": layout, "recipe_version": 1, "head": "keep"}
    assert quantization["extra_config"][workshop.modules[0]]["bits"] == 16
    text = {"num_hidden_layers": 4, "tie_word_embeddings": False, "added": 1}
    assert workshop.read("config.json")["text_config"] == text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_build_writes_complete_receipt_and_second_build_changes_nothing(workshop, layout):
    workshop.build(layout=layout)
    receipt = workshop.read("receipt.json")
    assert receipt["digest"] == "1" * 64
    assert receipt["plan"] == workshop.plan(layout=layout)
    assert receipt["tensors"] == len(workshop.result())
    present = {path.name for path in workshop.out.iterdir()} - {"receipt.json"}
    assert {file["path"] for file in receipt["files"]} == present
    assert run_tool("verify", workshop.out, "--full").returncode == 0
    assert list(workshop.out.parent.iterdir()) == [workshop.out]
    before = {path.name: path.stat().st_mtime_ns for path in workshop.out.iterdir()}
    workshop.build(layout=layout)
    assert {path.name: path.stat().st_mtime_ns for path in workshop.out.iterdir()} == before


def test_never_replaces_a_checkpoint_built_from_a_different_plan(workshop):
    workshop.build()
    assert workshop.build(check=False, digest="2" * 64).returncode == 3
    assert workshop.read("receipt.json")["digest"] == "1" * 64


def test_rejects_base_at_different_commit(workshop):
    workshop.write_base(receipt=False)
    done = workshop.build(check=False)
    assert done.returncode == 3
    assert BASE_COMMIT in done.stderr
    assert not workshop.out.exists()


def test_hashes_an_unpinned_base(workshop):
    workshop.write_base(receipt=False)
    workshop.build(base={"dir": str(workshop.base_dir), "revision": None})
    files = workshop.read("receipt.json")["files"]
    hashes = {file["path"]: file["sha256"] for file in files if "link_of" in file}
    assert hashes.items() <= workshop.base_hashes().items()
    assert len(hashes) == 5


def count_hashed_bytes(workshop, layout):
    done = workshop.build(layout=layout)
    phases = [line for line in done.stdout.splitlines() if line.startswith("phase=hash-base")]
    shutil.rmtree(workshop.out)
    return max((int(re.search(r"total=(\d+)", line)[1]) for line in phases), default=0)


def test_hashes_large_base_files_if_the_receipt_lacks_piece_hashes(workshop):
    workshop.base["lm_head.weight"] = Raw("BF16", (VOCABULARY, 8192), bytes(VOCABULARY * 16384))
    workshop.write_base()
    assert count_hashed_bytes(workshop, "full") == 0
    path = workshop.base_dir / "receipt.json"
    receipt = json.loads(path.read_text())
    for entry in receipt["files"]:
        entry.pop("pieces")
    path.write_text(json.dumps(receipt))
    [large] = [
        path.stat().st_size for path in workshop.base_dir.iterdir() if path.stat().st_size > 4 << 20
    ]
    assert count_hashed_bytes(workshop, "overlay") == 0
    assert count_hashed_bytes(workshop, "full") == large


def test_rejects_receipt_with_pieces_that_do_not_cover_the_file(workshop):
    workshop.write_base()
    path = workshop.base_dir / "receipt.json"
    receipt = json.loads(path.read_text())
    next(file for file in receipt["files"] if len(file["pieces"]) > 1)["pieces"].pop()
    path.write_text(json.dumps(receipt))
    assert workshop.build(check=False, layout="full").returncode == 5


def test_receipt_lists_hash_of_each_piece_of_rewritten_shard(workshop):
    workshop.build(layout="full")
    base = json.loads((workshop.base_dir / "receipt.json").read_text())["files"]
    base_pieces = {line for entry in base for line in entry["pieces"]}
    reused = 0
    for entry in workshop.read("receipt.json")["files"]:
        data = (workshop.out / entry["path"]).read_bytes()
        if "pieces" not in entry:
            assert entry["sha256"] == hashlib.sha256(data).hexdigest()
            continue
        for line in entry["pieces"]:
            size, sha256 = line.split(":")
            piece, data = data[: int(size)], data[int(size) :]
            assert hashlib.sha256(piece).hexdigest() == sha256
            reused += line in base_pieces
        assert data == b""
    assert reused > 10


def test_rejects_result_with_correct_tensor_count_but_wrong_name(workshop, monkeypatch):
    def misname(name):
        correct = overlay_name(name)
        return correct[:-3] + "f8" if name == f"{MODULE}.up_proj.weight" else correct

    workshop.write_sources()
    plan = read_build_plan(workshop.write_plan())
    monkeypatch.setattr(layouts, "overlay_name", misname)
    with pytest.raises(ReceiptMismatchError) as refusal:
        building.build(plan, Progress())
    for name in (overlay_name(f"{MODULE}.up_proj.weight"), misname(f"{MODULE}.up_proj.weight")):
        assert f": {name}," in str(refusal.value)
    assert not workshop.out.exists()


@pytest.mark.slow
def test_numpy_is_imported_only_for_builds(workshop, tmp_path):
    workshop.build()
    absent = tmp_path / "absent" / "numpy.py"
    absent.parent.mkdir()
    absent.write_text("raise ModuleNotFoundError('gone', name='numpy')\n")
    path = f"{absent.parent}{os.pathsep}{tool_environment()['PYTHONPATH']}"

    def run(*arguments):
        command = [sys.executable, "-m", "spark_checkpoint", *map(str, arguments)]
        env = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert run("verify", workshop.out).returncode == 0
    assert run("inspect", workshop.out).returncode == 0
    assert run("check-sources", workshop.root / "plan.json", workshop.base_dir).returncode == 0
    refused = run("build", workshop.write_plan())
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith("error: numpy is not installed; fix: ")
