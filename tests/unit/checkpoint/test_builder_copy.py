"""A finished tree is copied from a peer: proven by a receipt whose hash came another way."""

import hashlib
import json
import os
import shutil

import pytest
from builder_hub import Hub
from builder_trees import run_tool

DIGEST = "1" * 64
KEY = "the-key-of-the-peers"


class Copying:
    """A tree that a peer has, and the order to copy it."""

    def __init__(self, workshop, peer, layout):
        self.workshop, self.peer, self.layout = workshop, peer, layout
        workshop.write_base()
        workshop.write_donor()
        workshop.build(layout=layout)
        self.theirs = workshop.root / "theirs"
        workshop.out.rename(self.theirs)
        (peer.root / DIGEST).mkdir()
        (peer.root / DIGEST / "files").symlink_to(self.theirs)
        (workshop.root / "key").write_text(KEY + "\n")
        self.told = hashlib.sha256((self.theirs / "receipt.json").read_bytes()).hexdigest()

    def build(self, url=None, check=True):
        order = {
            "schema_version": 1,
            "digest": DIGEST,
            "trees": [{"url": url or self.peer.url, "receipt_sha256": self.told}],
            "key_file": str(self.workshop.root / "key"),
        }
        path = self.workshop.root / "copy.json"
        path.write_text(json.dumps(order))
        plan = self.workshop.write_plan(layout=self.layout)
        return run_tool("build", plan, "--or-copy", path, check=check)

    def lose_donor(self):
        """From now on nothing can be built here."""
        shutil.rmtree(self.workshop.donor_dir)

    def is_theirs(self):
        ours, theirs = contents(self.workshop.out), contents(self.theirs)
        return ours == theirs and run_tool("verify", self.workshop.out, "--full").returncode == 0


def contents(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "receipt.json"
    }


@pytest.fixture(params=["overlay", "full"])
def copying(workshop, tmp_path, request):
    with Hub(tmp_path / "peer") as peer:
        yield Copying(workshop, peer, request.param)


def test_what_a_peer_has_is_not_built_again(copying):
    copying.lose_donor()
    assert "copied from" in copying.build().stderr
    assert copying.is_theirs()
    assert {headers.get("Authorization") for _, headers, _ in copying.peer.requests} == {
        f"Bearer {KEY}"
    }
    assert "already has" in copying.build().stderr


def test_what_is_the_base_s_is_linked_and_not_sent(copying):
    copying.build()
    out, base = copying.workshop.out, copying.workshop.base_dir
    linked = {path.name for path in out.iterdir() if path.stat().st_nlink > 1}
    asked = {path.rpartition("/")[2] for path, *_ in copying.peer.requests}
    assert not linked & asked
    if copying.layout == "overlay":
        assert {path.name for path in base.glob("*.safetensors")} <= linked


def test_a_copy_knows_the_plan_and_the_files_of_this_host(copying):
    copying.build()
    receipt = json.loads((copying.workshop.out / "receipt.json").read_text())
    assert receipt["plan"]["out"] == str(copying.workshop.out)
    for file in receipt["files"]:
        stat = os.stat(copying.workshop.out / file["path"])
        assert (file["inode"], file["modified_ns"]) == (stat.st_ino, stat.st_mtime_ns)


def test_other_bytes_than_the_receipt_s_are_refused_and_it_is_built(copying):
    largest = max(
        (path for path in copying.theirs.glob("*.safetensors") if path.stat().st_nlink == 1),
        key=lambda path: path.stat().st_size,
    )
    before = largest.read_bytes()
    largest.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    said = copying.build().stderr
    assert "copy: " in said
    assert "copied from" not in said
    largest.write_bytes(before)
    assert copying.is_theirs()


def test_another_receipt_than_the_one_told_of_is_refused(copying):
    copying.told = "0" * 64
    assert "differs from the receipt read through SSH" in copying.build().stderr
    assert {path.rpartition("/")[2] for path, *_ in copying.peer.requests} == {"receipt.json"}
    assert copying.is_theirs()


def test_a_peer_that_is_not_there_leaves_the_work_to_this_host(copying):
    assert "copied from" not in copying.build("http://127.0.0.1:9").stderr
    assert copying.is_theirs()
