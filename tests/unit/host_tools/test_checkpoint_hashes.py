import hashlib
import os

import pytest
from spark_contract import documents
from spark_contract.paths import RECEIPT_NAME
from spark_contract.receipts import ReceiptFile, SourceReceipt
from spark_host.watch import daily
from spark_host.watch.daily import HASH_DAYS, hash_next

PIECE = 1000


def write_tree(tree):
    entries = []
    for name, size, with_pieces in (("a.bin", 25_500, True), ("b", 70, False), ("c/d", 900, False)):
        data = os.urandom(size)
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        cut = [data[start : start + PIECE] for start in range(0, size, PIECE)]
        pieces = tuple(f"{len(part)}:{hashlib.sha256(part).hexdigest()}" for part in cut)
        sha256 = None if with_pieces else hashlib.sha256(data).hexdigest()
        entries.append(ReceiptFile(name, size, sha256, pieces=pieces if with_pieces else None))
    receipt = SourceReceipt("source", "d" * 64, tuple(entries), "1", "", "lab/tiny", "c" * 40)
    (tree / RECEIPT_NAME).write_text(documents.to_json(receipt))
    return tree


def flip_byte(path, offset):
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("name", "offset"), [("a.bin", 0), ("a.bin", 12_345), ("a.bin", 25_499), ("b", 69), ("c/d", 0)]
)
def test_detects_flipped_byte_within_14_days_even_if_mtime_is_unchanged(tmp_path, name, offset):
    trees = [write_tree(tmp_path / tree) for tree in ("first", "second")]
    flip_byte(trees[1] / name, offset)
    position, damaged = 7, ()
    for _ in range(HASH_DAYS):
        problems, position = hash_next(trees, position, damaged)
        damaged = tuple(problems)
    [part] = damaged
    assert problems[part].what.startswith(str(trees[1] / name))
    flip_byte(trees[1] / name, offset)
    assert hash_next(trees, position, damaged)[0] == {}


def test_damage_is_reported_on_a_slow_disk(tmp_path, monkeypatch):
    tree = write_tree(tmp_path / "tree")
    flip_byte(tree / "a.bin", 0)
    problems, _ = hash_next([tree], 0)
    monkeypatch.setattr(daily, "_DAILY_LIMIT_S", -1)
    assert hash_next([tree], 9, tuple(problems)) == (problems, 9)


def test_healthy_checkpoints_are_read_once_in_14_days(tmp_path):
    trees, position, parts = [write_tree(tmp_path / "tree")], 0, 0
    for _ in range(HASH_DAYS):
        problems, following = hash_next(trees, position)
        assert problems == {}
        parts += (following - position) % 28
        position = following
    assert 28 <= parts <= 28 + HASH_DAYS // 2


def test_lost_file_is_reported_and_other_trees_are_ignored(tmp_path):
    tree = write_tree(tmp_path / "tree")
    assert hash_next([tmp_path / "none", tmp_path], 3) == ({}, 3)
    (tree / "a.bin").unlink()
    problems, _ = hash_next([tmp_path / "none", tree], 0)
    assert {problem.where for problem in problems.values()} == {"checkpoint"}
