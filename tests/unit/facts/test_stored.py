import hashlib
import subprocess

import pytest

from spark_deploy.hosts.disk import StoredFiles, parse_stored, stored_script
from spark_deploy.hosts.facts import split_sections
from tests.receipts import source_receipt
from tests.unit.shell import run_script

MIB = 1 << 20
CONTENT = {letter: letter.encode() * MIB for letter in "abcd"}
SHA256 = {letter: hashlib.sha256(content).hexdigest() for letter, content in CONTENT.items()}
HUB = "home/ann/.cache/huggingface/hub"


@pytest.fixture
def root(tmp_path):
    blobs = tmp_path / HUB / "models--org--name/blobs"
    source = tmp_path / "sources/org--name-0123"
    blobs.mkdir(parents=True)
    source.mkdir(parents=True)
    for letter in "ab":
        (blobs / SHA256[letter]).write_bytes(CONTENT[letter])
    (source / "model-1.safetensors").write_bytes(CONTENT["c"])
    (source / "unlisted.safetensors").write_bytes(CONTENT["d"])
    files = [
        {"path": "model-1.safetensors", "size_bytes": MIB, "sha256": SHA256["c"]},
        {"path": "gone.safetensors", "size_bytes": MIB, "sha256": "9" * 64},
    ]
    (source / "receipt.json").write_text(source_receipt(files=files))
    return tmp_path


def read_stored(root, *look_in):
    globs = [f"{root}/{folder}" for folder in look_in or ("sources", f"home/*/{HUB[9:]}")]
    script = stored_script([f"{root}/sources/new"], globs)
    return parse_stored(split_sections(run_script(script))["stored"])


def linkable_mib(root, wanted, *look_in):
    files = [(SHA256[letter], MIB) for letter in wanted]
    return read_stored(root, *look_in).linkable_bytes(f"{root}/sources/new", files) // MIB


def test_only_hashed_blobs_and_files_with_receipts_are_linkable(root):
    assert linkable_mib(root, "abc") == 3
    assert linkable_mib(root, "a") == 1
    assert linkable_mib(root, "b", "sources") == 0
    assert linkable_mib(root, "d") == 0
    folders = read_stored(root).folders
    assert folders[SHA256["a"]] == f"{root}/{HUB}"
    assert folders[SHA256["c"]] == f"{root}/sources/org--name-0123"
    other_filesystem = StoredFiles({"/data/x": "other"}, read_stored(root).files)
    assert other_filesystem.linkable_bytes("/data/x", [(SHA256["a"], MIB)]) == 0


@pytest.mark.parametrize("file", [("0" * 64, MIB), ("9" * 64, MIB), (SHA256["a"], 2 * MIB)])
def test_only_files_with_matching_hash_and_size_are_counted(root, file):
    assert read_stored(root).linkable_bytes(f"{root}/sources/new", [file]) == 0


def test_reads_folders_with_spaces_in_names_or_damaged_receipts(root):
    (root / "my models").mkdir()
    (root / "my models" / SHA256["d"]).write_bytes(CONTENT["d"])
    (root / "sources/org--name-0123/receipt.json").write_text("{")
    assert linkable_mib(root, "cd", "sources", "my models", "nowhere", "no*ne") == 1
    assert stored_script(["/srv/x"], []) == ""


@pytest.mark.parametrize("spoil", ["chown 1000", "chmod 666", "chmod 600"])
def test_files_writable_by_others_are_copied_not_linked(root, spoil):
    blob = root / HUB / "models--org--name/blobs" / SHA256["a"]
    subprocess.run([*spoil.split(), blob], check=True)
    assert linkable_mib(root, "ab") == 1
    assert SHA256["a"] in read_stored(root).folders
