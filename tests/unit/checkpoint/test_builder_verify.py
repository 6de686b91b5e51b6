import json
import os
import re
import shutil

import pytest
from builder_faults import flip, run_broken, spread_calls
from builder_judge import LAYOUTS, MODULE
from builder_trees import run_tool

OVERLAY_SHARD = "model-spark-overlay.safetensors"
INDEX = "model.safetensors.index.json"


def edit_index(edit):
    def damage(out):
        status, document = (out / INDEX).stat(), json.loads((out / INDEX).read_text())
        edit(document["weight_map"])
        (out / INDEX).write_text(json.dumps(document).ljust(status.st_size))
        os.utime(out / INDEX, ns=(status.st_atime_ns, status.st_mtime_ns))

    return damage


def replace_shard(out):
    path = out / "model-00002-of-00003.safetensors"
    status, other = path.stat(), path.with_name("other")
    shutil.copyfile(path, other)
    flip(other, keep_time=False)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


def edit_config(out):
    text = (out / "config.json").read_text()
    (out / "config.json").write_text(text.replace("spark_inc", "spark_inx"))


SHARD = "model-0000{}-of-00003.safetensors"
DAMAGES = {
    "a missing file": lambda out: (out / "tokenizer.json").unlink(),
    "a surplus file": lambda out: (out / "stray.bin").write_bytes(b"x"),
    "a truncated shard": lambda out: os.truncate(out / SHARD.format(1), 100),
    "a changed header": lambda out: flip(out / SHARD.format(2), keep_time=False, offset=8),
    "an index without a name": edit_index(lambda names: names.popitem()),
    "an index with a surplus name": edit_index(lambda names: names.update(x=SHARD.format(1))),
    "an index with a missing shard": edit_index(
        lambda names: names.update({"lm_head.weight": SHARD.format(9)})
    ),
    "another file of the same size and time": replace_shard,
    "a broken receipt": lambda out: (out / "receipt.json").write_text("{"),
    "a missing receipt": lambda out: (out / "receipt.json").unlink(),
    "an edited config": edit_config,
}
OVERLAY_DAMAGES = {
    "a truncated overlay": lambda out: os.truncate(out / OVERLAY_SHARD, 100),
    "a missing overlay": lambda out: (out / OVERLAY_SHARD).unlink(),
    "a changed overlay header": lambda out: flip(out / OVERLAY_SHARD, keep_time=False, offset=8),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "damage"),
    [(layout, name) for layout in LAYOUTS for name in DAMAGES]
    + [("overlay", name) for name in OVERLAY_DAMAGES],
)
def test_quick_check_finds_damage(workshop, layout, damage):
    workshop.build(layout=layout)
    (DAMAGES | OVERLAY_DAMAGES)[damage](workshop.out)
    done = run_tool("verify", "--quick", workshop.out, check=False)
    assert done.returncode == 5
    assert re.fullmatch(r"error: \S.*; fix: .*\n", done.stderr)


def test_verify_is_quick_by_default_and_rejects_quick_combined_with_full(workshop):
    workshop.build()
    for option in ((), ("--quick",)):
        text = run_tool("verify", *option, workshop.out).stdout
        assert re.findall(r"phase=\S+", text) == ["phase=verify", "phase=done"]
    assert run_tool("verify", "--quick", "--full", workshop.out, check=False).returncode == 2


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
def test_rejects_renamed_tensor(workshop, layout, choice, old, new):
    workshop.build(layout=layout, **choice)
    run_tool("verify", workshop.out)
    for path in workshop.out.iterdir():
        data, status = path.read_bytes(), path.stat()
        if path.name != "receipt.json":
            path.unlink()
            path.write_bytes(data.replace(f'"{old}"'.encode(), f'"{new}"'.encode()))
            os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    done = run_tool("verify", workshop.out, check=False)
    assert done.returncode == 5
    assert "missing 1 (1 x " in done.stderr
    assert "surplus 1 (1 x " in done.stderr


@pytest.mark.parametrize("plan", [None, [], {"layout": "full"}, {"base_tensors": ["a{"]}])
def test_rejects_receipt_with_invalid_plan(workshop, plan):
    workshop.build()
    receipt = workshop.read("receipt.json")
    receipt["plan"] = {**receipt["plan"], **plan} if plan and "base_tensors" in plan else plan
    (workshop.out / "receipt.json").write_text(json.dumps(receipt))
    assert run_tool("verify", workshop.out, check=False).returncode == 5


def hashed_bytes(done):
    return int(re.search(r"phase=verify bytes=0 total=(\d+)", done.stdout)[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hashes_touched_files_once_and_updates_their_recorded_stat(workshop, layout):
    workshop.build(layout=layout)
    before = workshop.read("receipt.json")
    assert hashed_bytes(run_tool("verify", workshop.out)) == 0
    shard = workshop.out / SHARD.format(1)
    os.utime(shard)
    assert hashed_bytes(run_tool("verify", workshop.out)) == shard.stat().st_size
    assert hashed_bytes(run_tool("verify", workshop.out)) == 0
    after = workshop.read("receipt.json")
    for entry in before["files"]:
        if entry["path"] == shard.name:
            entry["modified_ns"] = shard.stat().st_mtime_ns
    assert after == before


def test_verify_that_was_killed_is_finished_by_the_next_run(workshop):
    workshop.build(layout="full")
    os.utime(workshop.out / SHARD.format(1))
    killed = run_broken("verify", workshop.out, number=1, names=["rename"])
    assert killed.returncode == -9
    assert len(list(workshop.out.glob(".receipt.json.*"))) == 1
    run_tool("verify", workshop.out)
    assert list(workshop.out.glob(".*")) == []
    assert hashed_bytes(run_tool("verify", workshop.out)) == 0


def test_adds_missing_inodes_to_a_receipt_from_an_older_builder(workshop):
    workshop.build()
    new = workshop.read("receipt.json")
    old = {
        **new,
        "files": [
            {key: value for key, value in file.items() if key != "inode"} for file in new["files"]
        ],
    }
    (workshop.out / "receipt.json").write_text(json.dumps(old))
    whole = sum(file["size_bytes"] for file in new["files"])
    assert [hashed_bytes(run_tool("verify", workshop.out)) for _ in range(2)] == [whole, 0]
    assert workshop.read("receipt.json") == new


def test_verifies_a_checkpoint_on_a_full_disk(workshop):
    workshop.build(layout="full")
    os.utime(workshop.out / "config.json")
    runs = [run_broken("verify", workshop.out, act="disk_full", number=2) for _ in range(2)]
    assert [done.returncode for done in runs] == [0, 0]
    assert len({hashed_bytes(done) for done in runs} - {0}) == 1
    assert all("cannot update the receipt (No space left" in done.stderr for done in runs)
    assert list(workshop.out.glob(".*")) == []


@pytest.fixture
def built(workshop):
    workshop.build(layout="full")
    return workshop


def discard(workshop, *, base=None, check=True):
    return run_tool("discard", base or workshop.base_dir, "--tree", workshop.out, check=check)


def assert_keeps_base(workshop, code, **more):
    before = workshop.base_hashes()
    done = discard(workshop, check=False, **more)
    assert done.returncode == code, done.stderr
    assert workshop.base_hashes() == before


def test_discard_removes_base_and_keeps_result(built, tmp_path):
    tensors = built.result()
    sizes = {path: path.stat().st_size for path in built.base_dir.iterdir()}
    shard = min(path for path in sizes if path.suffix == ".safetensors")
    os.link(shard, tmp_path / "link")
    done = discard(built, base=os.path.relpath(built.base_dir))
    assert not built.base_dir.exists()
    freed = sum(sizes.values()) - sizes[shard]
    assert f"removed, {freed} bytes freed; " in done.stderr
    assert f"still use {sizes[shard]} bytes" in done.stderr
    assert built.result() == tensors
    assert run_tool("verify", built.out, "--full").returncode == 0
    assert discard(built).returncode == 0


def test_discard_keeps_base_of_damaged_result(built):
    shard = max(built.out.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip(shard, keep_time=True, offset=shard.stat().st_size - 1)
    assert_keeps_base(built, 5)
    (built.out / "receipt.json").unlink()
    assert_keeps_base(built, 5)


def test_discard_keeps_base_of_overlay(workshop):
    workshop.build(layout="overlay")
    assert_keeps_base(workshop, 3)


def test_discard_keeps_base_of_different_checkpoint(built, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(built.base_dir, other)
    assert_keeps_base(built, 3, base=other)
    assert len(list(other.iterdir())) == len(list(built.base_dir.iterdir()))


def test_discard_keeps_unmanaged_directory(built):
    (built.base_dir / "receipt.json").unlink()
    assert_keeps_base(built, 3)


@pytest.mark.parametrize("left", ["files and receipt", "receipt", "empty"])
def test_discard_finishes_interrupted_removal(built, left):
    for path in built.base_dir.iterdir():
        keep = path.name == "receipt.json" if left == "receipt" else path.suffix == ".json"
        if left == "empty" or not keep:
            path.unlink()
    discard(built)
    assert not built.base_dir.exists()


@pytest.mark.slow
def test_discard_removes_receipt_last_even_if_killed(built, tmp_path):
    saved = tmp_path / "saved"
    shutil.copytree(built.base_dir, saved)
    arguments = ("discard", built.base_dir, "--tree", built.out)
    calls = run_broken(*arguments).calls
    killed = 0
    for number in spread_calls(calls):
        shutil.copytree(saved, built.base_dir)
        killed += run_broken(*arguments, number=number).returncode == -9
        if built.base_dir.exists() and any(built.base_dir.iterdir()):
            assert (built.base_dir / "receipt.json").exists()
        discard(built)
        assert not built.base_dir.exists()
    assert killed > 5
    assert run_tool("verify", built.out, "--full").returncode == 0
