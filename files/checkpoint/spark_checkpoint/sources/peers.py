"""Download files and finished checkpoints from other hosts, verified like those of the hub."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spark_contract import receipts
from spark_contract.documents import DocumentError
from spark_contract.errors import HostToolError
from spark_contract.fetching import CopyPlan, FetchPlan, FinishedTree, Wire, of_tree
from spark_contract.files import sync, write_all
from spark_contract.job import read_progress
from spark_contract.orders import BuildPlan, RequantizePlan
from spark_contract.paths import RECEIPT_NAME
from spark_contract.receipts import (
    CheckpointReceipt,
    ReceiptFile,
    RequantizedReceipt,
    SourceReceipt,
)

from spark_checkpoint.errors import BuilderError, GateRefused, TransferFailed
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.receipt import write_receipt
from spark_checkpoint.sources.pacing import cancelled
from spark_checkpoint.sources.transport import Transport
from spark_checkpoint.storage import Passed, clear, refuse_without_room
from spark_checkpoint.verify import verify_checkpoint

_REST_S = 300.0  # a peer that was left is asked again
_POLL_S = 1.0
_TIMEOUT_S = 10.0
_PROGRESS_BYTES = 4096

Take = Callable[[Transport, str], None]


@dataclass(slots=True)
class _Peer:
    """One host that may have files of the tree."""

    url: str
    moved_at: float  # when it was last seen to get on
    told: tuple[str | None, int | None] | None = None
    left_until: float = 0.0
    why: str = "stands still"


class Peers:
    """The peers of one order; its methods may be called from several threads."""

    def __init__(self, plan: FetchPlan, stop: threading.Event):
        self._plan, self._stop = plan, stop
        self._patience_s = plan.peers.patience_s if plan.peers else 0.0
        self._lock = threading.Lock()
        urls = plan.peers.urls if plan.peers else ()
        now = time.monotonic()
        self._peers = [_Peer(of_tree(url, plan.digest), now) for url in urls]

    def bring(self, path: str, take: Take) -> bool:
        """Have a peer's file taken; return False when none has it or is about to.

        Args:
            path: of the file in the tree.
            take: reads and proves the file at an address; what it left is gone on from.
        """
        while asked := self._asked():
            transport = self._transport()
            if transport is None:
                return False
            for peer in asked:
                if self._took(peer, path, take, transport):
                    return True
            if not any([self._gets_on(peer, transport) for peer in asked]):
                return False
            if self._stop.wait(_POLL_S):
                raise cancelled(path)
        return False

    def _asked(self) -> list[_Peer]:
        return [peer for peer in self._peers if peer.left_until <= time.monotonic()]

    def _transport(self) -> Transport | None:
        """Return a client with the key of now: another deploy may have made a new one."""
        if self._plan.peers is None:
            return None
        wire = Wire(
            tries=1,
            backoff_s=0.0,
            token_file=self._plan.peers.key_file,
            parallel=self._plan.parallel,
            timeout_s=_TIMEOUT_S,
        )
        try:
            return Transport(wire, self._plan.peers.urls, direct=True, stop=self._stop)
        except HostToolError as error:
            note(f"peers are not asked: {error}")
            return None

    def _took(self, peer: _Peer, path: str, take: Take, transport: Transport) -> bool:
        url = f"{peer.url}/files/{quote(path)}"
        try:
            if not transport.has(url):
                return False
            take(transport, url)
        except GateRefused as error:
            note(f"peer: {error}")
            peer.left_until = float("inf")
            return False
        except TransferFailed as error:
            if self._stop.is_set():
                raise
            note(f"peer: {error}")
            return False
        peer.moved_at = time.monotonic()
        return True

    def _gets_on(self, peer: _Peer, transport: Transport) -> bool:
        """Return whether to wait for a peer: its work on the tree went on a moment ago."""
        told = peer.told
        try:
            line = transport.read_whole(f"{peer.url}/progress", _PROGRESS_BYTES).decode()
            found = read_progress(line, None)
            told, peer.why = (found.phase, found.bytes), "stands still"
        except (GateRefused, TransferFailed, UnicodeDecodeError) as error:
            peer.why = str(error)
        with self._lock:
            now = time.monotonic()
            if told != peer.told:
                peer.told, peer.moved_at = told, now
            if now - peer.moved_at < self._patience_s or peer.left_until > now:
                return peer.left_until <= now
            note(f"peer: {peer.url}: left for {_REST_S:.0f} s: {peer.why}")
            peer.left_until = now + _REST_S
            return False


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
