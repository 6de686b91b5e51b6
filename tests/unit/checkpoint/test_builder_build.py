"""What a build makes of a base and a donor, in both layouts."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from builder_judge import MODULE
from builder_shards import Raw, readable_by_safetensors
from builder_trees import BASE_COMMIT, VOCABULARY, run_tool, tool_environment, tree_tensors
from spark_checkpoint.__main__ import read_build_plan
from spark_checkpoint.build import build as building
from spark_checkpoint.build import layouts
from spark_checkpoint.errors import TreeDiffers
from spark_checkpoint.progress import Progress
from spark_checkpoint.tensor_sets import overlay_name

LAYOUTS = ("overlay", "full")


def plain_name(name):
    return name.replace("_scale_inv_fp8", "_scale_inv").replace("weight_fp8", "weight")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exactly_the_swap_set_changes_and_every_other_byte_is_the_bases(workshop, layout):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout=layout)
    result = {plain_name(name): raw for name, raw in workshop.result().items()}
    swapped = {f"{m}.{s}" for m in workshop.modules for s in ("weight", "weight_scale_inv")}
    untouched = {**workshop.base, **workshop.mtp}
    assert result.keys() == untouched.keys() | swapped
    for name, raw in result.items():
        assert raw == (workshop.donor if name in swapped else untouched)[name], name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_safetensors_package_reads_every_shard(workshop, layout):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout=layout)
    index = json.loads((workshop.out / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in set(index.values()):
        names = readable_by_safetensors(workshop.out / shard)
        assert {name for name, where in index.items() if where == shard} <= names


def test_an_overlay_links_the_base_and_leaves_the_old_names_out_of_the_index(workshop):
    workshop.write_base()
    workshop.write_donor()
    before = workshop.base_hashes()
    workshop.build(layout="overlay")
    index = json.loads((workshop.out / "model.safetensors.index.json").read_text())["weight_map"]
    for module in workshop.modules:
        assert f"{module}.weight" not in index
        assert index[f"{module}.weight_fp8"] == "model-spark-overlay.safetensors"
        assert index[f"{module}.weight_scale_inv_fp8"] == "model-spark-overlay.safetensors"
    for shard in workshop.base_dir.glob("*.safetensors"):
        assert os.path.samefile(shard, workshop.out / shard.name)
    assert workshop.base_hashes() == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_config_names_the_plugin_and_every_fp8_module(workshop, layout):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout=layout, extra={"text_config": {"added": 1}})
    config = json.loads((workshop.out / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "spark_inc"
    assert sorted(quantization["fp8_block"]["modules"]) == workshop.modules
    assert quantization["fp8_block"]["block_shape"] == [128, 128]
    assert quantization["spark"] == {"layout": layout, "recipe_version": 1, "head": "keep"}
    assert quantization["extra_config"][workshop.modules[0]]["bits"] == 16
    assert config["text_config"] == {
        "num_hidden_layers": 4,
        "tie_word_embeddings": False,
        "added": 1,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_receipt_is_complete_and_verify_accepts_the_tree(workshop, layout):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout=layout)
    receipt = json.loads((workshop.out / "receipt.json").read_text())
    assert receipt["digest"] == "1" * 64
    assert receipt["plan"] == workshop.plan(layout=layout)
    assert receipt["tensors"] == len(tree_tensors(workshop.out))
    present = {p.name for p in workshop.out.iterdir()} - {"receipt.json"}
    assert {file["path"] for file in receipt["files"]} == present
    assert run_tool("verify", workshop.out, "--full").returncode == 0
    assert list(workshop.out.parent.iterdir()) == [workshop.out]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_build_of_the_same_plan_does_nothing(workshop, layout):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout=layout)
    before = {p.name: p.stat().st_mtime_ns for p in workshop.out.iterdir()}
    done = workshop.build(layout=layout)
    assert "already has plan" in done.stderr
    assert {p.name: p.stat().st_mtime_ns for p in workshop.out.iterdir()} == before


def test_a_directory_of_another_plan_is_never_replaced(workshop):
    workshop.write_base()
    workshop.write_donor()
    workshop.build()
    done = workshop.build(check=False, digest="2" * 64)
    assert done.returncode == 3
    assert "not ours to replace" in done.stderr


def test_a_base_without_the_plans_commit_is_refused(workshop):
    workshop.write_base(receipt=False)
    workshop.write_donor()
    done = workshop.build(check=False)
    assert done.returncode == 3
    assert "has no receipt" in done.stderr
    assert BASE_COMMIT in done.stderr
    assert not workshop.out.exists()


def test_an_unpinned_base_is_hashed_by_the_build_itself(workshop):
    workshop.write_base(receipt=False)
    workshop.write_donor()
    workshop.build(base={"dir": str(workshop.base_dir), "revision": None})
    receipt = json.loads((workshop.out / "receipt.json").read_text())
    hashes = {f["path"]: f["sha256"] for f in receipt["files"] if "link_of" in f}
    assert hashes.items() <= workshop.base_hashes().items()
    assert len(hashes) == 5


def count_reads(workshop, layout):
    """Return how many bytes of the base the build hashed before it began to write."""
    done = workshop.build(layout=layout)
    phases = [line for line in done.stdout.splitlines() if line.startswith("phase=hash-base")]
    return max((int(re.search(r"total=(\d+)", line)[1]) for line in phases), default=0)


def drop_from_receipt(workshop, key):
    path = workshop.base_dir / "receipt.json"
    receipt = json.loads(path.read_text())
    for entry in receipt["files"]:
        entry.pop(key)
    path.write_text(json.dumps(receipt))


def test_a_source_with_a_receipt_without_pieces_is_hashed_first_and_then_serves(workshop):
    # Larger than a piece, or the hash of the whole would be the hash of the only piece.
    workshop.base["lm_head.weight"] = Raw("BF16", (VOCABULARY, 8192), bytes(VOCABULARY * 16384))
    workshop.write_base()
    workshop.write_donor()
    assert count_reads(workshop, "full") == 0
    shutil.rmtree(workshop.out)
    drop_from_receipt(workshop, "pieces")
    large = [p.stat().st_size for p in workshop.base_dir.iterdir() if p.stat().st_size > 4 << 20]
    assert len(large) == 1
    assert count_reads(workshop, "overlay") == 0
    shutil.rmtree(workshop.out)
    assert count_reads(workshop, "full") == sum(large)
    assert run_tool("verify", workshop.out, "--full").returncode == 0


def test_pieces_that_do_not_cover_their_file_make_no_receipt(workshop):
    workshop.write_base()
    workshop.write_donor()
    path = workshop.base_dir / "receipt.json"
    receipt = json.loads(path.read_text())
    next(f for f in receipt["files"] if len(f["pieces"]) > 1)["pieces"].pop()
    path.write_text(json.dumps(receipt))
    done = workshop.build(check=False, layout="full")
    assert done.returncode == 5
    assert "do not add up" in done.stderr


def test_the_pieces_of_a_rewritten_shard_are_the_hashes_of_its_bytes(workshop):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout="full")
    base = json.loads((workshop.base_dir / "receipt.json").read_text())["files"]
    known = {line for entry in base for line in entry["pieces"]}
    taken_over = 0
    for entry in json.loads((workshop.out / "receipt.json").read_text())["files"]:
        data = (workshop.out / entry["path"]).read_bytes()
        if "pieces" not in entry:
            assert entry["sha256"] == hashlib.sha256(data).hexdigest()
            continue
        for line in entry["pieces"]:
            size, sha256 = line.split(":")
            piece, data = data[: int(size)], data[int(size) :]
            assert hashlib.sha256(piece).hexdigest() == sha256
            taken_over += line in known
        assert data == b""
    assert taken_over > 10


def test_a_result_with_another_name_in_place_of_one_is_refused(workshop, monkeypatch):
    # As many names, of which one is wrong: what a broken mapping of names would give.
    def misnamed(name):
        right = overlay_name(name)
        return right[:-3] + "f8" if name == f"{MODULE}.up_proj.weight" else right

    workshop.write_base()
    workshop.write_donor()
    plan = read_build_plan(workshop.write_plan())
    monkeypatch.setattr(layouts, "overlay_name", misnamed)
    with pytest.raises(TreeDiffers, match="tensors of the plan's result") as refusal:
        building.build(plan, Progress())
    name = f"{MODULE}.up_proj.weight"
    assert f": {overlay_name(name)}, surplus 1 " in str(refusal.value)
    assert f": {misnamed(name)}, likely " in str(refusal.value)
    assert not workshop.out.exists()


def test_only_a_build_needs_numpy_and_says_so_in_one_line(workshop, tmp_path):
    workshop.write_base()
    workshop.write_donor()
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
    assert run("hold", workshop.root / "plan.json", workshop.base_dir).returncode == 0
    refused = run("build", workshop.write_plan())
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith("error: numpy: not found; fix: ")
