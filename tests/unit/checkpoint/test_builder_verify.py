"""What verify finds wrong with a finished tree."""

import json
import os
import re

import pytest
from builder_faults import flip
from builder_judge import MODULE
from builder_trees import run_tool

LAYOUTS = ("overlay", "full")
OVERLAY_SHARD = "model-spark-overlay.safetensors"


@pytest.fixture
def scene(workshop):
    workshop.write_base()
    workshop.write_donor()
    return workshop


DAMAGES = {
    "a file gone": lambda out: (out / "tokenizer.json").unlink(),
    "a file too many": lambda out: (out / "stray.bin").write_bytes(b"x"),
    "a shard cut": lambda out: os.truncate(out / "model-00001-of-00003.safetensors", 100),
    "a shard's header changed": lambda out: flip(
        out / "model-00002-of-00003.safetensors", keep_time=False, offset=8
    ),
    "the index without a name": lambda out: edit_index(out, lambda names: names.popitem()),
    "the index with a name too many": lambda out: edit_index(
        out, lambda names: names.update({"surplus": "model-00001-of-00003.safetensors"})
    ),
    "the index naming a file that is not there": lambda out: edit_index(
        out, lambda names: names.update({"lm_head.weight": "model-00009-of-00003.safetensors"})
    ),
    "the receipt broken": lambda out: (out / "receipt.json").write_text("{"),
    "the receipt gone": lambda out: (out / "receipt.json").unlink(),
    "the config edited in place": lambda out: (out / "config.json").write_text(
        (out / "config.json").read_text().replace("spark_inc", "spark_inx")
    ),
}


OVERLAY_DAMAGES = {
    "the overlay shard cut": lambda out: os.truncate(out / OVERLAY_SHARD, 100),
    "the overlay shard gone": lambda out: (out / OVERLAY_SHARD).unlink(),
    "the overlay shard's header changed": lambda out: flip(
        out / OVERLAY_SHARD, keep_time=False, offset=8
    ),
}


def edit_index(out, edit):
    """Change the names and leave the time stamp as the receipt has it."""
    index = out / "model.safetensors.index.json"
    status, document = index.stat(), json.loads(index.read_text())
    edit(document["weight_map"])
    index.write_text(json.dumps(document).ljust(status.st_size))
    os.utime(index, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("layout", "damage"),
    [(layout, name) for layout in LAYOUTS for name in DAMAGES]
    + [("overlay", name) for name in OVERLAY_DAMAGES],
)
def test_verify_finds_what_is_wrong_without_hashing_everything(scene, layout, damage):
    scene.build(layout=layout)
    (DAMAGES | OVERLAY_DAMAGES)[damage](scene.out)
    done = run_tool("verify", "--quick", scene.out, check=False)
    assert done.returncode == 5
    assert len(done.stderr.strip().splitlines()) == 1
    assert re.match(r"error: \S.*; fix: ", done.stderr)


def test_quick_is_what_verify_does_anyway_and_not_together_with_full(scene):
    scene.build()
    outputs = [run_tool("verify", *option, scene.out).stdout for option in ((), ("--quick",))]
    assert [re.findall(r"phase=\S+", text) for text in outputs] == [
        ["phase=verify", "phase=done"]
    ] * 2
    done = run_tool("verify", "--quick", "--full", scene.out, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"error: arguments: .*not allowed with.*; fix: .*--help`\n", done.stderr)


def rename_everywhere(directory, old, new):
    """Rename a tensor in index and header, with time stamps as they were."""
    for path in directory.iterdir():
        data, status = path.read_bytes(), path.stat()
        if path.name != "receipt.json":
            path.unlink()  # it may be a link of the base's
            path.write_bytes(data.replace(f'"{old}"'.encode(), f'"{new}"'.encode()))
            os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("layout", "choice", "old", "new"),
    [
        ("overlay", {}, f"{MODULE}.up_proj.weight_fp8", f"{MODULE}.up_proj.weight_fp9"),
        ("overlay", {"head": "int8-g128"}, "lm_head.scales_int8", "lm_head.scales_int9"),
        ("full", {"head": "int8-g128"}, "lm_head.qzeros", "lm_head.qzerox"),
        ("full", {}, "lm_head.weight", "lm_head.weighs"),
        ("full", {}, "mtp.norm.weight", "mtp.norm.weighs"),
    ],
)
def test_verify_refuses_as_many_names_of_which_one_is_another(scene, layout, choice, old, new):
    scene.build(layout=layout, **choice)
    run_tool("verify", scene.out)
    rename_everywhere(scene.out, old, new)
    done = run_tool("verify", scene.out, check=False)
    assert done.returncode == 5
    assert "tensors of the plan's result" in done.stderr
    assert "missing 1 (1 x " in done.stderr
    assert "surplus 1 (1 x " in done.stderr


@pytest.mark.parametrize("plan", [None, [], {"layout": "full"}, {"base_tensors": ["a{"]}])
def test_verify_refuses_a_receipt_whose_plan_says_no_tensors(scene, plan):
    scene.build()
    path = scene.out / "receipt.json"
    receipt = json.loads(path.read_text())
    receipt["plan"] = {**receipt["plan"], **plan} if plan and "base_tensors" in plan else plan
    path.write_text(json.dumps(receipt))
    done = run_tool("verify", scene.out, check=False)
    assert done.returncode == 5
    assert "fix: move the directory away" in done.stderr
