"""Copy a finished checkpoint from a peer and verify every byte against its receipt."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spark_contract import receipts
from spark_contract.documents import DocumentError
from spark_contract.fetching import CopyPlan, FinishedTree, Wire, of_tree
from spark_contract.files import sync, write_all
from spark_contract.orders import BuildPlan, RequantizePlan
from spark_contract.paths import RECEIPT_NAME
from spark_contract.receipts import (
    CheckpointReceipt,
    ReceiptFile,
    RequantizedReceipt,
    SourceReceipt,
)

from spark_checkpoint.errors import BuilderError, GateRefused
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.receipt import write_receipt
from spark_checkpoint.sources.transport import Transport
from spark_checkpoint.storage import Passed, clear, refuse_without_room
from spark_checkpoint.verify.verify import verify_checkpoint

_RECEIPT_LIMIT_BYTES = 64 << 20
_FIX = "it is built here instead"


_Plan = BuildPlan | RequantizePlan
_Made = CheckpointReceipt | RequantizedReceipt


def copy_from_peer(order: CopyPlan, plan: _Plan, tree_dir: Path, progress: Progress) -> bool:
    """Copy the plan's checkpoint from a peer and verify it; return False if no peer has it."""
    for peer in order.trees:
        tree_dir.mkdir(exist_ok=True)
        clear(tree_dir)
        try:
            _copy(peer, order, plan, tree_dir, progress)
            return True
        except BuilderError as error:
            note(f"copy: {error}")
    clear(tree_dir)
    tree_dir.rmdir()
    return False


def _copy(
    peer: FinishedTree, order: CopyPlan, plan: _Plan, tree_dir: Path, progress: Progress
) -> None:
    wire = Wire(tries=2, token_file=order.key_file, timeout_s=10)
    transport = Transport(wire, (peer.url,), direct=True)
    files = f"{of_tree(peer.url, order.digest)}/files/"
    receipt = _receipt(transport, files + RECEIPT_NAME, peer.receipt_sha256, plan)
    sent = [file for file in receipt.files if not _linked(file, plan, tree_dir)]
    size_bytes = sum(file.size_bytes for file in sent)
    refuse_without_room(tree_dir, size_bytes, f"copying {plan.name}")
    progress.phase("copy", size_bytes)
    for file in sent:
        _stream(transport, files + quote(file.path), file, tree_dir / file.path, progress)
    ours: Any = plan  # equal digests mean equal kinds of plan
    write_receipt(tree_dir, replace(receipt, plan=ours))
    # Every stat differs from the peer's receipt, so every file is hashed.
    verify_checkpoint(tree_dir, progress, full=False)
    note(f"{plan.out_dir}: copied from {peer.url}")


def _receipt(transport: Transport, url: str, sha256: str, plan: _Plan) -> _Made:
    raw = transport.read_whole(url, _RECEIPT_LIMIT_BYTES)
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise GateRefused(url, "is another receipt than the one told of", _FIX)
    try:
        receipt = receipts.parse(raw)
    except DocumentError as error:
        raise GateRefused(url, f"is no receipt ({error})", _FIX) from error
    if isinstance(receipt, SourceReceipt) or receipt.digest != plan.digest:
        raise GateRefused(url, "is of another tree", _FIX)
    return receipt


def _linked(file: ReceiptFile, plan: _Plan, tree_dir: Path) -> bool:
    """Hard-link a file of the base if this host has it."""
    if file.link_of is None or not isinstance(plan, BuildPlan):
        return False
    target = tree_dir / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link((plan.base_dir / file.path).resolve(), target)
    except OSError as error:
        note(f"copy: {file.path}: not linked to the base ({error.strerror}), copied")
        return False
    return True


def _stream(
    transport: Transport, url: str, file: ReceiptFile, target: Path, progress: Progress
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        passed = Passed(fd)
        for piece in transport.stream(url, 0, file.size_bytes, file.size_bytes):
            write_all(fd, piece)
            passed.go(len(piece))
            progress.add(len(piece))
        sync(fd)
        passed.all()
    finally:
        os.close(fd)
