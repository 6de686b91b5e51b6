"""What a hub cache or an earlier tree holds is known by hash, never by size alone."""

import hashlib
import subprocess

import pytest

from spark_deploy.hosts.disk import Stored, parse_stored, stored_script
from spark_deploy.hosts.facts import split_sections
from tests.receipts import source_receipt
from tests.unit.shell import run_script

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path):
    """A host's folders: a hub cache with two blobs, and a source tree of ours with a receipt."""
    blobs = tmp_path / "home/ann/.cache/huggingface/hub/models--org--name/blobs"
    blobs.mkdir(parents=True)
    shards = {letter: letter.encode() * MIB for letter in "abcd"}
    sha256 = {letter: hashlib.sha256(data).hexdigest() for letter, data in shards.items()}
    for letter in "ab":
        (blobs / sha256[letter]).write_bytes(shards[letter])
    tree = tmp_path / "sources/org--name-0123"
    tree.mkdir(parents=True)
    (tree / "model-1.safetensors").write_bytes(shards["c"])
    (tree / "unlisted.safetensors").write_bytes(shards["d"])
    files = [
        {"path": "model-1.safetensors", "size_bytes": MIB, "sha256": sha256["c"]},
        {"path": "gone.safetensors", "size_bytes": MIB, "sha256": "9" * 64},
    ]
    (tree / "receipt.json").write_text(source_receipt(files=files))
    return tmp_path, sha256


def look(root, wanted, look_in=("sources", "home/*/.cache/huggingface/hub")):
    target = str(root / "sources/org--name-4567")
    script = stored_script([target], [f"{root}/{folder}" for folder in look_in])
    found = parse_stored(split_sections(run_script(script))["stored"])
    return found, found.linkable_bytes(target, wanted)


def test_blobs_named_by_their_hash_and_files_of_a_receipt_are_found(disk):
    root, sha256 = disk
    assert look(root, [(sha256[letter], MIB) for letter in "abc"])[1] == 3 * MIB
    assert look(root, [(sha256["a"], MIB)])[1] == MIB
    assert look(root, [(sha256["b"], MIB)], look_in=["sources"])[1] == 0


def test_it_is_told_by_cache_or_tree_where_they_lie(disk):
    root, sha256 = disk
    found, _ = look(root, [])
    assert found.folders[sha256["a"]] == f"{root}/home/ann/.cache/huggingface/hub"
    assert found.folders[sha256["c"]] == f"{root}/sources/org--name-0123"


def test_equal_size_is_no_proof_of_equal_content(disk):
    root, sha256 = disk
    assert look(root, [("0" * 64, MIB), (sha256["d"], MIB), ("9" * 64, MIB)])[1] == 0


def test_a_file_cut_short_does_not_count(disk):
    root, sha256 = disk
    assert look(root, [(sha256["a"], 2 * MIB)])[1] == 0


def test_what_is_on_another_filesystem_has_to_be_copied_and_needs_room(disk):
    root, sha256 = disk
    found, _ = look(root, [])
    elsewhere = Stored({"/data/x": "other"}, found.files)
    assert elsewhere.linkable_bytes("/data/x", [(sha256["a"], MIB)]) == 0


def test_folders_with_spaces_and_damaged_receipts_are_survived(disk):
    root, sha256 = disk
    (root / "my models").mkdir()
    (root / "my models" / sha256["d"]).write_bytes(b"d" * MIB)
    (root / "sources/org--name-0123/receipt.json").write_text("{")
    wanted = [(sha256[letter], MIB) for letter in "cd"]
    assert look(root, wanted, look_in=["sources", "my models", "nowhere", "no*ne"])[1] == MIB


def test_nothing_is_asked_where_there_is_nothing_to_look_in():
    assert stored_script(["/srv/x"], []) == ""


@pytest.mark.parametrize("spoil", ["chown 1000", "chmod 666", "chmod 600"])
def test_what_others_could_change_is_copied_and_needs_room_but_is_known(disk, spoil):
    root, sha256 = disk
    blobs = root / "home/ann/.cache/huggingface/hub/models--org--name/blobs"
    subprocess.run([*spoil.split(), blobs / sha256["a"]], check=True)
    found, linkable = look(root, [(sha256[letter], MIB) for letter in "ab"])
    assert linkable == MIB
    assert sha256["a"] in found.folders
