"""Killed, out of disk, sources changing underneath: the result is whole or absent."""

import json
import os
import re
import subprocess

import pytest
from builder_faults import POINTS, flip, points, run_broken
from builder_hub import fetch_order
from builder_shards import read_shard
from builder_trees import file_entries, run_tool, tree_tensors
from spark_checkpoint.errors import TransferFailed
from spark_checkpoint.storage import publish

from tests.unit.prerequisites import missing

LAYOUTS = ("overlay", "full")


@pytest.fixture
def scene(workshop):
    workshop.write_base()
    workshop.write_donor()
    return workshop


def whole_or_absent(workshop, bytes_before):
    assert workshop.base_hashes() == bytes_before
    if workshop.out.exists():
        run_tool("verify", workshop.out, "--full")


def told_of_the_full_disk(stderr, directory):
    """Which file, how much is free where, and that room is what is missing."""
    last = stderr.strip().splitlines()[-1]
    said = re.fullmatch(
        r"error: (\S+): No space left on device \(\d+ bytes( and \d+ files)? are free on /\S*\); "
        r"fix: free space on this filesystem, then run again: it resumes here",
        last,
    )
    assert said, last
    assert said[1].startswith(str(directory)), last


def remove(tree):
    for path in sorted(tree.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    tree.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act", ["kill", "disk_full"])
def test_a_build_broken_at_any_call_leaves_nothing_half_and_the_next_run_finishes(
    scene, layout, act
):
    plan = scene.write_plan(layout=layout, head="int8-g128")
    before = scene.base_hashes()
    calls = run_broken("build", plan, act=act).calls
    expected = tree_tensors(scene.out)
    remove(scene.out)
    broken = 0
    for number in points(calls):
        done = run_broken("build", plan, act=act, number=number)
        code = done.returncode
        assert code in (-9 if act == "kill" else 4, 0)
        if code == 4:
            told_of_the_full_disk(done.stderr, scene.root)
        broken += code != 0
        whole_or_absent(scene, before)
        run_tool("build", plan)
        assert tree_tensors(scene.out) == expected
        assert [p.name for p in scene.out.parent.iterdir()] == [scene.out.name]
        remove(scene.out)
    assert broken > POINTS // 2


@pytest.mark.slow
@pytest.mark.parametrize("act", ["kill", "disk_full"])
def test_a_fetch_broken_at_any_call_leaves_nothing_half_and_the_next_run_finishes(
    tmp_path, hub, act
):
    source = hub.root / "r"
    (source / "sub").mkdir(parents=True)
    for number, size in enumerate((3_000_000, 70_000, 0)):
        (source / "sub" / f"{number}").write_bytes(os.urandom(size))
    local = tmp_path / "local"
    local.mkdir()
    (local / "x").write_bytes((source / "sub/1").read_bytes())
    order, out = tmp_path / "fetch.json", tmp_path / "out"
    order.write_text(
        json.dumps(fetch_order(source, out, urls=[f"{hub.url}/r"], look_in=[str(local)]))
    )
    calls = run_broken("fetch", order, act=act).calls
    expected = file_entries(source)
    remove(out)
    for number in points(calls):
        code = run_broken("fetch", order, act=act, number=number).returncode
        assert code in (-9 if act == "kill" else 4, 0)
        if out.exists():
            run_tool("verify", out, "--full")
        run_tool("fetch", order)
        assert file_entries(out) == expected
        assert not (tmp_path / ".out.partial").exists()
        assert (local / "x").read_bytes() == (source / "sub/1").read_bytes()
        remove(out)


def test_a_filesystem_that_is_too_small_is_refused_before_the_first_byte(scene, small_disk):
    out = small_disk(600 << 10) / "models" / "tiny"
    out.parent.mkdir()
    done = scene.build(check=False, layout="full", out=str(out))
    assert done.returncode == 3
    assert "bytes, " in done.stderr
    assert "are free; fix: free " in done.stderr
    assert list(out.parent.glob("*/*")) == []


def test_a_disk_that_fills_during_the_build_gives_one_line_and_loses_nothing(scene, small_disk):
    disk = small_disk(4 << 20)
    out = disk / "models" / "tiny"
    plan = scene.write_plan(layout="full", out=str(out))
    out.parent.mkdir()
    refusals = 0
    for filler_bytes in range(3_900_000, 1_500_000, -400_000):
        filler = disk / "filler"
        filler.write_bytes(bytes(filler_bytes))
        done = run_broken("build", plan)
        filler.unlink()
        if done.returncode == 0:
            break
        assert done.returncode == 4
        told_of_the_full_disk(done.stderr, disk)
        assert f"files are free on {disk})" in done.stderr
        assert not out.exists()
        refusals += 1
    assert refusals > 0
    run_tool("build", plan)
    run_tool("verify", out, "--full")


def test_a_disk_full_at_the_last_rename_asks_for_room_and_not_for_the_name(scene):
    plan = scene.write_plan()
    renames = {"act": "disk_full", "names": ["rename"]}
    last = run_broken("build", plan, **renames).calls
    remove(scene.out)
    done = run_broken("build", plan, number=last, **renames)
    assert done.returncode == 4
    told_of_the_full_disk(done.stderr, scene.out.parent)
    assert not scene.out.exists()
    run_tool("build", plan)


def test_a_name_taken_at_the_last_rename_asks_for_the_name(tmp_path):
    partial, out = tmp_path / "partial", tmp_path / "out"
    partial.mkdir()
    out.write_text("somebody's")
    with pytest.raises(TransferFailed, match=r"cannot take its name.*move the existing entry away"):
        publish(partial, out)
    assert out.read_text() == "somebody's"


# --- what a power cut may take -----------------------------------------------------------------


def flushed_in_order(out, journal):
    """Every file before the receipt's name, every directory before the tree's, then its parent."""
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    receipt = next(n for n, e in enumerate(events) if str(e[1]).endswith("/receipt.json"))
    tree = events.index(["rename", str(out)])
    assert receipt < tree
    linked = {f["path"] for f in json.loads((out / "receipt.json").read_text())["files"]
              if "link_of" in f}  # fmt: skip
    flushed = 0
    for path in [out, *out.rglob("*")]:
        name, event = str(path.relative_to(out)), ["fsync", path.stat().st_ino]
        if name in linked:
            continue
        begin, end = (receipt, tree) if path.is_dir() else (0, receipt)
        assert event in events[begin:end], name
        flushed += 1
    assert ["fsync", out.parent.stat().st_ino] in events[tree:]
    return flushed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_of_a_built_tree_is_flushed_before_it_takes_its_name(scene, layout):
    journal = scene.root / "journal"
    plan = scene.write_plan(layout=layout, head="int8-g128")
    assert run_tool("build", plan, fault={"journal": str(journal)}).returncode == 0
    assert flushed_in_order(scene.out, journal) >= (5 if layout == "overlay" else 8)


@pytest.mark.parametrize("place", ["hub", "another filesystem"])
def test_all_of_a_fetched_tree_is_flushed_before_it_takes_its_name(
    tmp_path, hub, small_disk, place
):
    source, out, journal = hub.root / "r", tmp_path / "out", tmp_path / "journal"
    (source / "sub").mkdir(parents=True)
    (source / "sub/large").write_bytes(os.urandom(3_000_000))
    (source / "small").write_bytes(b"x")
    changes = {"urls": [f"{hub.url}/r"]}
    if place != "hub":
        disk = small_disk(8 << 20)
        (disk / "found").write_bytes((source / "sub/large").read_bytes())
        changes["look_in"] = [str(disk)]
    order = tmp_path / "fetch.json"
    order.write_text(json.dumps(fetch_order(source, out, **changes)))
    assert run_tool("fetch", order, fault={"journal": str(journal)}).returncode == 0
    assert flushed_in_order(out, journal) == 5


@pytest.fixture
def small_disk(tmp_path):
    """Mount small filesystems in memory; they are gone after the test."""
    mounted = []

    def mount(size_bytes):
        if os.geteuid() != 0:
            missing("mounting a small filesystem needs root")
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            missing(f"mount is not allowed here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_an_overlay_across_filesystems_says_what_to_do(scene, small_disk):
    out = small_disk(16 << 20) / "models" / "tiny"
    out.parent.mkdir()
    done = scene.build(check=False, out=str(out))
    assert done.returncode == 3
    assert "another filesystem" in done.stderr
    assert "set layout to full" in done.stderr
    scene.build(layout="full", out=str(out))


# --- sources that change -----------------------------------------------------------------------


def largest_shard(workshop):
    return max(workshop.base_dir.glob("model-0*.safetensors"), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_base_shard_edited_after_its_fetch_is_noticed(scene, layout):
    flip(largest_shard(scene), keep_time=False)
    done = scene.build(check=False, layout=layout)
    assert done.returncode == 3
    assert "was changed after it was fetched" in done.stderr
    assert not scene.out.exists()


def test_a_flipped_byte_is_noticed_wherever_it_is_while_a_shard_is_rewritten(scene):
    shard = largest_shard(scene)
    size = shard.stat().st_size
    for offset in (9, size // 3, size // 2, size - 100):
        flip(shard, keep_time=True, offset=offset)
        done = scene.build(check=False, layout="full")
        flip(shard, keep_time=True, offset=offset)
        assert done.returncode == 3
        assert not scene.out.exists()
        # A byte of the header may make it unreadable before any hash is compared.
        assert offset == 9 or "its receipt lists" in done.stderr


def test_a_flipped_byte_that_the_result_would_not_have_held_is_noticed_too(scene):
    name = next(n for n in scene.base if ".shared_expert." in n and n.endswith(".up_proj.weight"))
    shard = next(p for p in scene.base_dir.glob("model-0*") if name in read_shard(p))
    offset = shard.read_bytes().index(scene.base[name].data)
    # The lowest bit of a mantissa: the donor's weight is still right within its rounding.
    flip(shard, keep_time=True, offset=offset)
    done = scene.build(check=False, layout="full")
    assert done.returncode == 3
    assert "its receipt lists" in done.stderr


def test_a_byte_flipped_in_a_rewritten_shard_is_found_and_placed_by_the_full_check(scene):
    scene.build(layout="full")
    shard = max(scene.out.glob("model-0*.safetensors"), key=lambda p: p.stat().st_size)
    flip(shard, keep_time=True)
    assert run_tool("verify", scene.out).returncode == 0
    done = run_tool("verify", scene.out, "--full", check=False)
    assert done.returncode == 5
    begin = int(re.search(r"in the piece from byte (\d+)", done.stderr)[1])
    assert 0 < begin <= shard.stat().st_size - 100


def test_a_flipped_byte_under_an_overlay_is_found_by_the_full_check(scene):
    scene.build()
    flip(largest_shard(scene), keep_time=True)
    assert run_tool("verify", scene.out).returncode == 0
    done = run_tool("verify", scene.out, "--full", check=False)
    assert done.returncode == 5
    assert "has sha256" in done.stderr


@pytest.mark.parametrize("act", ["append", "truncate", "rewrite"])
def test_a_base_that_changes_while_it_is_read_is_noticed(scene, act):
    plan, shard = scene.write_plan(layout="full"), largest_shard(scene)
    reads = {"path": shard, "names": ["readv"], "only_path": True}
    last = run_broken("build", plan, **reads).calls
    remove(scene.out)
    done = run_broken("build", plan, act=act, number=last, **reads)
    assert done.returncode == 3
    assert not scene.out.exists()


def test_a_truncated_donor_is_refused(scene):
    shard = sorted(scene.donor_dir.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1)
    done = scene.build(check=False)
    assert done.returncode == 3
    assert "tensors end at byte" in done.stderr


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_finished_tree_that_was_damaged_is_reported_and_not_rebuilt_over(scene, layout):
    scene.build(layout=layout)
    (scene.out / "config.json").write_text("{}")
    done = scene.build(check=False, layout=layout)
    assert done.returncode == 5
    assert "config.json: has 2 bytes" in done.stderr
    assert "move the directory away" in done.stderr
