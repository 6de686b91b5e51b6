"""Removes a base once a full tree made from it needs it no more."""

from __future__ import annotations

import os
from pathlib import Path

from spark_contract.files import sync_directory
from spark_contract.host.paths import RECEIPT_NAME
from spark_contract.work.receipts import CheckpointReceipt, Receipt

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.receipt import load_receipt
from spark_checkpoint.verify.verify import verify_tree


def discard(base: Path, tree: Path, progress: Progress) -> bool:
    """Remove ``base`` after every byte of ``tree`` was proven; False when it was gone before."""
    if not base.exists():
        note(f"{base}: was removed before")
        return False
    receipt = verify_tree(tree, progress, full=True)
    report = _standing_alone(tree, base, receipt).report
    if load_receipt(base) is None and any(base.iterdir()):
        raise GateRefused(
            str(base), "has no receipt, so it is not ours to remove", "remove it by hand"
        )
    freed, shared = _remove(base)
    left = f"; {shared} bytes stay, other directories link them" if shared else ""
    again = sum(report.get("rebuild_fetch_bytes", {}).values())
    note(f"{base}: removed, {freed} bytes freed{left}; a rebuild of {tree} fetches {again} bytes")
    return True


def _standing_alone(tree: Path, base: Path, receipt: Receipt) -> CheckpointReceipt:
    """Return the receipt of a tree that needs ``base`` no more; refuse any other."""
    if not isinstance(receipt, CheckpointReceipt) or receipt.plan.layout != "full":
        raise GateRefused(str(tree), "is no checkpoint in layout full", "keep its base")
    made_from = receipt.plan.base_dir
    if made_from != Path(os.path.abspath(base)):
        raise GateRefused(str(tree), f"was made from {made_from}, not from {base}", "name its base")
    return receipt


def _remove(base: Path) -> tuple[int, int]:
    """Remove a directory; return the bytes this frees, and those that other links still hold.

    The receipt goes last: until then the directory is known to be ours, and a receipt whose files
    are missing vouches for nothing.
    """
    freed = shared = 0
    receipt = base / RECEIPT_NAME
    for path in sorted(base.rglob("*"), key=lambda path: (path == receipt, -len(path.parts))):
        if path.is_dir() and not path.is_symlink():
            os.rmdir(path)
            continue
        status = path.lstat()
        if status.st_nlink == 1:
            freed += status.st_size
        else:
            shared += status.st_size
        if path == receipt:
            sync_directory(base)
        os.unlink(path)
    os.rmdir(base)
    sync_directory(base.parent)
    return freed, shared
