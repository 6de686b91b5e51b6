"""Receipts of this builder: read before a tree is trusted, written last into a new one."""

from __future__ import annotations

from pathlib import Path

from spark_contract import documents
from spark_contract.paths import RECEIPT_NAME
from spark_contract.receipts import AnyReceipt, Receipt, ReceiptFile, parse

from spark_checkpoint.errors import TreeDiffers
from spark_checkpoint.format.piece_hashes import pieces_of
from spark_checkpoint.storage import Stamp, write_json


def load_receipt(directory: Path) -> AnyReceipt | None:
    """Return the receipt of a tree, None when there is none.

    Raises:
        TreeDiffers: the receipt is there but cannot be one of ours.
    """
    path = directory / RECEIPT_NAME
    try:
        receipt = parse(path.read_bytes())
        for file in receipt.files:
            pieces_of(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        fix = "move the directory away and run the deploy again"
        raise TreeDiffers(str(path), f"is no receipt ({error})", fix) from error
    return receipt


def vouched(
    path: str,
    stamp: Stamp,
    sha256: str | None,
    pieces: tuple[str, ...] | None = None,
    link_of: str | None = None,
) -> ReceiptFile:
    """Return a file of a receipt by what was seen of it when it was hashed."""
    size_bytes, modified_ns = stamp.size_bytes, stamp.modified_ns
    return ReceiptFile(path, size_bytes, sha256, modified_ns, pieces, link_of, stamp.inode)


def write_receipt(directory: Path, receipt: Receipt) -> None:
    """Write the receipt in one step; call it last."""
    write_json(directory / RECEIPT_NAME, documents.plain(receipt))
