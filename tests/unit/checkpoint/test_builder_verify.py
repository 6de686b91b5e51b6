"""What verify finds wrong with a finished tree."""

import json
import os
import re
import shutil

import pytest
from builder_faults import flip, run_broken
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
    "a shard that is another file of its size and time": lambda out: put_another_in_its_place(
        out / "model-00002-of-00003.safetensors"
    ),
    "the receipt broken": lambda out: (out / "receipt.json").write_text("{"),
    "the receipt gone": lambda out: (out / "receipt.json").unlink(),
    "the config edited in place": lambda out: (out / "config.json").write_text(
        (out / "config.json").read_text().replace("spark_inc", "spark_inx")
    ),
}


def put_another_in_its_place(path):
    """Replace a file by one with another byte, of the same size and time."""
    status, other = path.stat(), path.with_name("other")
    shutil.copyfile(path, other)
    flip(other, keep_time=False)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


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


def hashed_bytes(done):
    """Return how many bytes a run of verify was about to hash."""
    return int(re.search(r"phase=verify bytes=0 total=(\d+)", done.stdout)[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_touched_files_that_are_right_are_hashed_once_and_the_receipt_says_no_more(scene, layout):
    scene.build(layout=layout)
    before = json.loads((scene.out / "receipt.json").read_text())
    assert hashed_bytes(run_tool("verify", scene.out)) == 0
    shard = scene.out / "model-00001-of-00003.safetensors"
    os.utime(shard)
    assert hashed_bytes(run_tool("verify", scene.out)) == shard.stat().st_size
    assert hashed_bytes(run_tool("verify", scene.out)) == 0
    after = json.loads((scene.out / "receipt.json").read_text())
    [entry] = [one for one in after["files"] if one not in before["files"]]
    assert entry["modified_ns"] == shard.stat().st_mtime_ns
    [old] = [one for one in before["files"] if one["path"] == shard.name]
    assert {**entry, "modified_ns": 0} == {**old, "modified_ns": 0}
    assert {**after, "files": 0} == {**before, "files": 0}


def test_a_receipt_of_an_older_builder_is_completed_by_one_hash_of_everything(scene):
    scene.build()
    path = scene.out / "receipt.json"
    new = json.loads(path.read_text())
    old = {**new, "files": [{k: v for k, v in one.items() if k != "inode"} for one in new["files"]]}
    path.write_text(json.dumps(old))
    whole = sum(one["size_bytes"] for one in new["files"])
    assert [hashed_bytes(run_tool("verify", scene.out)) for _ in range(2)] == [whole, 0]
    assert json.loads(path.read_text()) == new


def test_a_tree_that_cannot_be_written_is_verified_and_hashed_again_next_time(scene):
    scene.build(layout="full")
    os.utime(scene.out / "config.json")
    # The second call that writes is the first of the new receipt; that of its folder is there.
    found = [run_broken("verify", scene.out, act="disk_full", number=2) for _ in range(2)]
    assert [done.returncode for done in found] == [0, 0]
    assert len({hashed_bytes(done) for done in found} - {0}) == 1
    assert all("receipt not updated (No space left" in done.stderr for done in found)
    assert {path.name for path in scene.out.glob(".*")} == set()
