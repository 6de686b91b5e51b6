import json
from pathlib import Path

import pytest
from spark_contract import documents, receipts
from spark_contract.documents import DocumentError

from tests.receipts import checkpoint_receipt, source_receipt

FILE = {"path": "a/b", "size_bytes": 3, "sha256": "0" * 64, "modified_ns": 1}
LINK = {**FILE, "path": "c", "link_of": "/base/c"}
SHARD = {"path": "d", "size_bytes": 3, "pieces": [f"3:{'1' * 64}"], "modified_ns": 1}


def test_source_receipt_round_trips():
    data = json.loads(source_receipt("d" * 64, [FILE, LINK, SHARD]))
    receipt = receipts.parse(json.dumps(data))
    assert isinstance(receipt, receipts.SourceReceipt)
    assert documents.to_plain(receipt) == data


def test_checkpoint_receipt_names_its_base():
    receipt = receipts.parse(checkpoint_receipt("/srv/base"))
    assert isinstance(receipt, receipts.CheckpointReceipt)
    assert receipt.plan.base_dir == Path("/srv/base")


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b", "", "."])
def test_rejects_receipt_with_path_outside_tree(tmp_path, path):
    (tmp_path / "receipt.json").write_text(source_receipt(files=[{**FILE, "path": path}]))
    assert receipts.find_receipt(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"kind": "invoice"}', "\xff"])
def test_rejects_invalid_receipt(tmp_path, text):
    assert receipts.find_receipt(tmp_path) is None
    (tmp_path / "receipt.json").write_bytes(text.encode("latin-1"))
    assert receipts.find_receipt(tmp_path) is None
    with pytest.raises(DocumentError):
        receipts.parse(text)


def test_tree_is_complete_if_sizes_match(tmp_path):
    receipt = receipts.parse(source_receipt(files=[{**FILE, "path": "a"}, SHARD]))
    (tmp_path / "a").write_text("abc")
    assert not receipt.is_complete(tmp_path)
    (tmp_path / "d").write_text("ab")
    assert not receipt.is_complete(tmp_path)
    (tmp_path / "d").write_text("abc")
    assert receipt.is_complete(tmp_path)
