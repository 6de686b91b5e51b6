"""A base goes only when the full tree made from it was proven byte by byte."""

import os
import shutil

import pytest
from builder_faults import points, run_broken
from builder_trees import run_tool


@pytest.fixture
def built(workshop):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout="full")
    return workshop


def discard(workshop, *, base=None, check=True):
    return run_tool("discard", base or workshop.base_dir, "--tree", workshop.out, check=check)


def refused(workshop, code, *words, **more):
    before = workshop.base_hashes()
    done = discard(workshop, check=False, **more)
    assert done.returncode == code, done.stderr
    for word in (*words, "; fix: "):
        assert word in done.stderr
    assert workshop.base_hashes() == before


def test_the_base_goes_and_the_tree_stays_whole_without_it(built):
    tensors = built.result()
    size = sum(path.stat().st_size for path in built.base_dir.iterdir())
    done = discard(built)
    assert not built.base_dir.exists()
    assert f"removed, {size} bytes freed; a rebuild of" in done.stderr
    assert built.result() == tensors
    assert run_tool("verify", built.out, "--full").returncode == 0


def test_a_base_named_from_where_one_stands_is_the_planned_one(built):
    discard(built, base=os.path.relpath(built.base_dir))
    assert not built.base_dir.exists()


def test_a_second_removal_does_nothing(built):
    discard(built)
    assert "was removed before" in discard(built).stderr


def test_one_flipped_byte_of_the_tree_keeps_the_base(built):
    shard = max(built.out.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    stamp = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # only reading it all finds this
    refused(built, 5, shard.name, "the receipt lists")


def test_a_tree_without_a_receipt_keeps_the_base(built):
    (built.out / "receipt.json").unlink()
    refused(built, 5, "it was never finished")


def test_an_overlay_keeps_its_base(workshop):
    workshop.write_base()
    workshop.write_donor()
    workshop.build(layout="overlay")
    refused(workshop, 3, "not a checkpoint in layout full")


def test_the_base_of_another_tree_is_not_touched(built, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(built.base_dir, other)
    refused(built, 3, "was made from", base=other)
    assert len(list(other.iterdir())) == len(list(built.base_dir.iterdir()))


def test_a_directory_of_somebody_else_is_not_touched(built):
    (built.base_dir / "receipt.json").unlink()
    refused(built, 3, "not ours to remove")


def test_bytes_that_other_directories_link_are_not_called_freed(built, tmp_path):
    shards = sorted(built.base_dir.glob("*.safetensors"))
    linked = shards[0].stat().st_size
    os.link(shards[0], tmp_path / "link")
    assert f"; {linked} bytes stay, other directories link them" in discard(built).stderr


@pytest.mark.parametrize("left", ["some files and the receipt", "the receipt", "nothing"])
def test_a_removal_cut_short_is_finished_by_the_next(built, left):
    for path in built.base_dir.iterdir():
        goes = left == "nothing" or path.name != "receipt.json"
        if goes and not (left.startswith("some") and path.suffix == ".json"):
            path.unlink()
    discard(built)
    assert not built.base_dir.exists()


def test_a_removal_killed_at_any_call_leaves_a_directory_known_to_be_ours(built, tmp_path):
    saved = tmp_path / "saved"
    shutil.copytree(built.base_dir, saved)
    arguments = ("discard", built.base_dir, "--tree", built.out)
    calls = run_broken(*arguments).calls
    killed = 0
    for number in points(calls):
        shutil.copytree(saved, built.base_dir)
        killed += run_broken(*arguments, number=number).returncode == -9
        if built.base_dir.exists() and any(built.base_dir.iterdir()):
            assert (built.base_dir / "receipt.json").exists()
        discard(built)
        assert not built.base_dir.exists()
    assert killed > 5
    assert run_tool("verify", built.out, "--full").returncode == 0
