import json
import os
import re
import shutil
import subprocess

import pytest
from builder_faults import POINTS, flip, run_broken, spread_calls
from builder_judge import LAYOUTS
from builder_shards import Raw, read_shard
from builder_trees import file_entries, run_tool, tree_tensors
from spark_checkpoint import TransferError
from spark_checkpoint.build.build import peak_bytes
from spark_checkpoint.directory import read_checkpoint
from spark_checkpoint.storage import publish
from spark_contract.builder_api import BuildPlan
from spark_contract.documents import parse

from tests.unit.prerequisites import missing

ACTS = {"kill": -9, "disk_full": 4}
FULL_DISK = (
    r"error: (\S+): No space left on device \(/\S* has \d+ bytes( and \d+ inodes)? free\); "
    r"fix: free space on this filesystem, then run the command again to resume"
)


@pytest.fixture
def scene(workshop):
    workshop.write_sources()
    return workshop


def assert_names_full_disk(stderr, directory):
    line = stderr.strip().splitlines()[-1]
    match = re.fullmatch(FULL_DISK, line)
    assert match, line
    assert match[1].startswith(str(directory)), line


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act", ACTS)
def test_build_interrupted_at_any_call_is_finished_by_next_run(scene, layout, act):
    plan = scene.write_plan(layout=layout, head="int8-g128")
    before = scene.base_hashes()
    calls = run_broken("build", plan, act=act).calls
    expected = tree_tensors(scene.out)
    shutil.rmtree(scene.out)
    broken = 0
    for number in spread_calls(calls):
        done = run_broken("build", plan, act=act, number=number)
        assert done.returncode in (ACTS[act], 0)
        if done.returncode == 4:
            assert_names_full_disk(done.stderr, scene.root)
        broken += done.returncode != 0
        assert scene.base_hashes() == before
        if scene.out.exists():
            run_tool("verify", scene.out, "--full")
        run_tool("build", plan)
        assert tree_tensors(scene.out) == expected
        assert [path.name for path in scene.out.parent.iterdir()] == [scene.out.name]
        shutil.rmtree(scene.out)
    assert broken > POINTS // 2


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTS)
def test_fetch_interrupted_at_any_call_is_finished_by_next_run(tmp_path, order, source, act):
    local, out, data = tmp_path / "local", tmp_path / "out", (source / "file-0.bin").read_bytes()
    local.mkdir()
    (local / "x").write_bytes(data)
    path = order(look_in=[str(local)])
    calls = run_broken("fetch", path, act=act).calls
    shutil.rmtree(out)
    for number in spread_calls(calls):
        assert run_broken("fetch", path, act=act, number=number).returncode in (ACTS[act], 0)
        if out.exists():
            run_tool("verify", out, "--full")
        run_tool("fetch", path)
        assert file_entries(out) == file_entries(source)
        assert not (tmp_path / ".out.partial").exists()
        assert (local / "x").read_bytes() == data
        shutil.rmtree(out)


@pytest.fixture
def small_disk(tmp_path):
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
        (place / "models").mkdir()
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_rejects_too_small_filesystem_before_writing(scene, small_disk):
    out = small_disk(600 << 10) / "models" / "tiny"
    done = scene.build(check=False, layout="full", out=str(out))
    assert done.returncode == 3
    assert "are free; fix: free " in done.stderr
    assert list(out.parent.glob("*/*")) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_required_space_excludes_ngram_tensors_that_move_to_a_file(workshop, layout):
    name = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight"
    workshop.base[name] = Raw("BF16", (50_000, 32), bytes(50_000 * 64))
    choices = {"layout": layout, "shared_experts": "keep", "donor": None, "donor_unmatched": []}
    workshop.build(**choices, ngram_table="e2m1")
    plan = parse(BuildPlan, workshop.write_plan(**choices, ngram_table="e2m1").read_text())
    paths = [path for path in workshop.out.iterdir() if path.suffix in (".safetensors", ".bin")]
    written = sum(path.stat().st_size for path in paths if path.stat().st_nlink == 1)
    required = peak_bytes(plan, read_checkpoint(workshop.base_dir), {}, [])
    assert 0 <= required - written < 10_000


def test_never_overwrites_an_existing_file_or_directory(tmp_path):
    partial, out = tmp_path / "partial", tmp_path / "out"
    partial.mkdir()
    out.write_text("existing")
    with pytest.raises(TransferError):
        publish(partial, out)
    assert out.read_text() == "existing"


def count_synced(out, journal):
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    receipt = next(
        number for number, event in enumerate(events) if str(event[1]).endswith("/receipt.json")
    )
    tree = events.index(["rename", str(out)])
    assert receipt < tree
    linked = {file["path"] for file in json.loads((out / "receipt.json").read_text())["files"]
              if "link_of" in file}  # fmt: skip
    synced = 0
    for path in [out, *out.rglob("*")]:
        name, event = str(path.relative_to(out)), ["fsync", path.stat().st_ino]
        if name in linked:
            continue
        begin, end = (receipt, tree) if path.is_dir() else (0, receipt)
        assert event in events[begin:end], name
        synced += 1
    assert ["fsync", out.parent.stat().st_ino] in events[tree:]
    return synced


@pytest.mark.parametrize("layout", LAYOUTS)
def test_syncs_a_built_checkpoint_before_the_rename(scene, layout):
    journal = scene.root / "journal"
    plan = scene.write_plan(layout=layout, head="int8-g128")
    assert run_tool("build", plan, fault={"journal": str(journal)}).returncode == 0
    assert count_synced(scene.out, journal) >= (5 if layout == "overlay" else 8)


@pytest.mark.parametrize("place", ["hub", "another filesystem"])
def test_syncs_a_fetched_checkpoint_before_the_rename(tmp_path, order, source, small_disk, place):
    look_in = []
    if place != "hub":
        disk = small_disk(8 << 20)
        (disk / "found").write_bytes((source / "file-1.bin").read_bytes())
        look_in = [str(disk)]
    journal = tmp_path / "journal"
    done = run_tool("fetch", order(look_in=look_in), fault={"journal": str(journal)})
    assert done.returncode == 0
    assert count_synced(tmp_path / "out", journal) == 8


def test_rejects_overlay_across_filesystems(scene, small_disk):
    out = small_disk(16 << 20) / "models" / "tiny"
    done = scene.build(check=False, out=str(out))
    assert done.returncode == 3
    assert "set layout to full" in done.stderr
    scene.build(layout="full", out=str(out))


def largest_shard(workshop):
    return max(workshop.base_dir.glob("model-0*.safetensors"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_detects_a_base_shard_edited_after_the_fetch(scene, layout):
    flip(largest_shard(scene), keep_time=False)
    assert scene.build(check=False, layout=layout).returncode == 3
    assert not scene.out.exists()


@pytest.mark.slow
def test_detects_a_flipped_byte_anywhere_in_a_rewritten_shard(scene):
    shard = largest_shard(scene)
    size = shard.stat().st_size
    replaced = next(
        raw.data for name, raw in read_shard(shard).items() if ".shared_expert." in name
    )
    for offset in (9, size // 3, size // 2, size - 100, shard.read_bytes().index(replaced)):
        flip(shard, keep_time=True, offset=offset)
        done = scene.build(check=False, layout="full")
        flip(shard, keep_time=True, offset=offset)
        assert done.returncode == 3
        assert not scene.out.exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_check_finds_a_flipped_byte(scene, layout):
    scene.build(layout=layout)
    tree = scene.out if layout == "full" else scene.base_dir
    shard = max(tree.glob("model-0*.safetensors"), key=lambda path: path.stat().st_size)
    flip(shard, keep_time=True)
    assert run_tool("verify", scene.out).returncode == 0
    done = run_tool("verify", scene.out, "--full", check=False)
    assert done.returncode == 5
    if layout == "full":
        begin = int(re.search(r"in the piece starting at byte (\d+)", done.stderr)[1])
        assert 0 < begin <= shard.stat().st_size - 100


@pytest.mark.parametrize("act", ["append", "truncate", "rewrite"])
def test_detects_a_base_that_changes_during_the_build(scene, act):
    plan, shard = scene.write_plan(layout="full"), largest_shard(scene)
    reads = {"path": shard, "names": ["readv"], "only_path": True}
    last = run_broken("build", plan, **reads).calls
    shutil.rmtree(scene.out)
    assert run_broken("build", plan, act=act, number=last, **reads).returncode == 3
    assert not scene.out.exists()


@pytest.mark.parametrize("act", ["append", "truncate", "rewrite"])
def test_overlay_never_contains_a_base_file_that_changed_during_the_build(scene, act):
    plan, shard = scene.write_plan(layout="overlay"), largest_shard(scene)
    done = run_broken("build", plan, act=act, number=1, path=shard, names=["link"])
    assert done.returncode == 3
    assert f"{shard}: changed during the build" in done.stderr
    assert not scene.out.exists()


def test_rejects_truncated_donor(scene):
    shard = sorted(scene.donor_dir.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1)
    assert scene.build(check=False).returncode == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_never_overwrites_damaged_checkpoint(scene, layout):
    scene.build(layout=layout)
    (scene.out / "config.json").write_text("{}")
    assert scene.build(check=False, layout=layout).returncode == 5
    assert (scene.out / "config.json").read_text() == "{}"
