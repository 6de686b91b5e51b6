"""Download and verify files and finished checkpoints of other hosts."""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from spark_contract import job, receipts
from spark_contract.builder_api import BuildPlan, RequantizePlan
from spark_contract.documents import DocumentError
from spark_contract.fetching import CopyPlan, FetchFile, FetchPlan, TransferOptions, tree_url
from spark_contract.paths import RECEIPT_NAME
from spark_contract.tool import HostToolError

from spark_checkpoint import BuilderError, TransferError, ValidationError
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.sources.client import HttpClient
from spark_checkpoint.sources.connections import SKIP_S, SlowSourceError, cancellation_error
from spark_checkpoint.storage import check_free_space, write_durably
from spark_checkpoint.verify import verify_checkpoint, write_receipt

_NOTE_INTERVAL_S = 600.0  # between messages while waiting for a peer
_POLL_S = 1.0
_TIMEOUT_S = 10.0
_WAIT_FACTOR = 20  # times the patience for a small file, because peers may fetch others first
_PROGRESS_BYTES = 4096
_RECEIPT_LIMIT_BYTES = 64 << 20
BUILD_LOCALLY = "do nothing, because this host builds the checkpoint itself"
_DATA_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")


@dataclass(slots=True)
class _Peer:
    url: str
    progressed_at: float
    progress: job.Progress | None = None
    skipped_until: float = 0.0
    problem: str = "no progress"


class Peers:
    """The peers of a download; thread-safe."""

    def __init__(self, plan: FetchPlan, stop: threading.Event):
        self._plan, self._stop = plan, stop
        self._patience_s = plan.peers.patience_s if plan.peers else 0.0
        # A peer that is still downloading may be slower than a source: if the hosts share a slow
        # line, the hub would not be faster.
        self._min_bytes_per_s = plan.min_bytes_per_s / 4
        self._lock = threading.Lock()
        urls = plan.peers.urls if plan.peers else ()
        self._peers = [_Peer(tree_url(url, plan.digest), time.monotonic()) for url in urls]

    def fetch(self, file: FetchFile, download: Callable[[HttpClient, str], None]) -> bool:
        """Download a file from a peer; return False if no peer has or will soon have the file."""
        path, plan = file.path, self._plan
        # All hosts download several files at once, in the same order. A peer that downloads at the
        # minimum rate has the file after this time.
        expected_s = plan.parallel * file.size_bytes / max(self._min_bytes_per_s, 1)
        deadline = time.monotonic() + _WAIT_FACTOR * self._patience_s + expected_s
        next_note = time.monotonic() + _NOTE_INTERVAL_S
        while active := [peer for peer in self._peers if peer.skipped_until <= time.monotonic()]:
            client = self._new_client()
            if client is None:
                return False
            for peer in active:
                if self._fetch_from(peer, path, download, client):
                    return True
            progressing = [peer for peer in active if self._is_progressing(peer, client)]
            if not progressing:
                return False
            if time.monotonic() > deadline:
                is_large_file = expected_s > self._patience_s
                for peer in active if is_large_file else ():
                    note(f"peer: {peer.url} will not be used again, because {path} took too long")
                    peer.skipped_until = float("inf")
                return False
            if time.monotonic() > next_note:
                note(f"peer: waiting for {path}")
                next_note += _NOTE_INTERVAL_S
            if self._stop.wait(_POLL_S):
                raise cancellation_error(path)
        return False

    def _new_client(self) -> HttpClient | None:
        """Return a client that uses the current key, because another deploy may replace the key."""
        if self._plan.peers is None:
            return None
        transfer = TransferOptions(
            tries=1,
            backoff_s=0.0,
            token_file=self._plan.peers.key_file,
            parallel=self._plan.parallel,
            timeout_s=_TIMEOUT_S,
            slow_bytes_per_s=self._plan.slow_bytes_per_s,
            slow_after_s=self._plan.slow_after_s,
        )
        try:
            return HttpClient(transfer, self._plan.peers.urls, direct=True, stop=self._stop)
        except HostToolError as error:
            note(f"no peer is used: {error}")
            return None

    def _fetch_from(
        self,
        peer: _Peer,
        path: str,
        download: Callable[[HttpClient, str], None],
        client: HttpClient,
    ) -> bool:
        url = f"{peer.url}/files/{quote(path)}"
        try:
            if not client.exists(url):
                return False
            download(client, url)
        except ValidationError as error:
            note(f"peer: {error}")
            peer.skipped_until = float("inf")
            return False
        except TransferError as error:
            if self._stop.is_set():
                raise
            note(f"peer: {error}")
            if isinstance(error, SlowSourceError):
                peer.skipped_until = time.monotonic() + SKIP_S
            return False
        peer.progressed_at = time.monotonic()
        return True

    def _is_progressing(self, peer: _Peer, client: HttpClient) -> bool:
        """Return whether a peer makes progress; skip a stalled peer for a while."""
        progress = peer.progress
        try:
            line = client.read_whole(f"{peer.url}/progress", _PROGRESS_BYTES).decode()
            progress = job.parse_progress(line, total_bytes=None)
            peer.problem = "no progress"
        except (ValidationError, TransferError, UnicodeDecodeError) as error:
            peer.problem = str(error)
        with self._lock:
            now = time.monotonic()
            if self._has_advanced(peer, progress, now):
                peer.progress, peer.progressed_at = progress, now
            if peer.skipped_until > now:
                return False
            if now - peer.progressed_at < self._patience_s:
                return True
            note(f"peer: skipping {peer.url} for {SKIP_S:.0f} s: {peer.problem}")
            peer.skipped_until = now + SKIP_S
            return False

    def _has_advanced(self, peer: _Peer, progress: job.Progress | None, now: float) -> bool:
        """Return whether a peer's phase changed, or whether its bytes grew fast enough."""
        if progress is None or peer.progress is None or progress.phase != peer.progress.phase:
            return progress != peer.progress
        new_bytes = (progress.bytes or 0) - (peer.progress.bytes or 0)
        return new_bytes > 0 and new_bytes >= self._min_bytes_per_s * (now - peer.progressed_at)


_Receipt = TypeVar("_Receipt", receipts.CheckpointReceipt, receipts.RequantizedReceipt)


def copy_from_peer(
    copies: CopyPlan,
    plan: BuildPlan | RequantizePlan,
    result_dir: Path,
    kind: type[_Receipt],
    copy: Callable[[TransferOptions, str, _Receipt], None],
) -> bool:
    """Copy the plan's checkpoint from the first peer where ``copy`` succeeds, if any.

    ``copy`` gets transfer options, the URL of the files and the receipt, and writes ``result_dir``.
    Return whether a copy succeeded. Files and receipt come from a host that may be hostile.
    """
    transfer = TransferOptions(tries=2, token_file=copies.key_file, timeout_s=_TIMEOUT_S)
    for tree in copies.trees:
        url = f"{tree_url(tree.url, copies.digest)}/files/"
        try:
            client = HttpClient(transfer, (tree.url,), direct=True)
            receipt = _read_receipt(client, url + RECEIPT_NAME, tree.receipt_sha256, plan, kind)
            shutil.rmtree(result_dir, ignore_errors=True)  # of an interrupted run
            result_dir.mkdir()
            copy(transfer, url, receipt)
        except (BuilderError, OSError, ValueError) as error:
            note(f"copy: {error}")
            shutil.rmtree(result_dir, ignore_errors=True)
            continue
        note(f"{plan.out_dir}: copied from {tree.url}")
        return True
    return False


def copy_requantized(
    transfer: TransferOptions,
    files_url: str,
    receipt: receipts.RequantizedReceipt,
    plan: RequantizePlan,
    result_dir: Path,
    progress: Progress,
) -> None:
    """Copy all files, which must be data files, and verify them against the receipt."""
    original = {file.path for file in plan.original.files}
    for path in {file.path for file in receipt.files} - original:
        if "/" in path or not path.endswith(_DATA_SUFFIXES):
            problem = "is not one of the checkpoint's files"
            raise ValidationError(files_url + quote(path), problem, BUILD_LOCALLY)
    client = HttpClient(transfer, (files_url,), direct=True)
    size_bytes = sum(file.size_bytes for file in receipt.files)
    check_free_space(result_dir, size_bytes, f"copying {plan.name}")
    progress.start_phase("copy", size_bytes)
    for file in receipt.files:
        target = result_dir / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        with write_durably(target, os.O_EXCL) as write:
            url = files_url + quote(file.path)
            for chunk in client.stream(url, 0, file.size_bytes, file.size_bytes):
                write(chunk)
                progress.add(len(chunk))
    write_receipt(result_dir, replace(receipt, plan=plan))
    verify_checkpoint(result_dir, progress, full=False)


def _read_receipt(
    client: HttpClient,
    url: str,
    sha256: str,
    plan: BuildPlan | RequantizePlan,
    kind: type[_Receipt],
) -> _Receipt:
    raw = client.read_whole(url, _RECEIPT_LIMIT_BYTES)
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise ValidationError(url, "differs from the receipt read through SSH", BUILD_LOCALLY)
    try:
        receipt = receipts.parse(raw)
    except DocumentError as error:
        raise ValidationError(url, f"is not a valid receipt ({error})", BUILD_LOCALLY) from error
    if not isinstance(receipt, kind) or receipt.digest != plan.digest:
        raise ValidationError(url, "belongs to another checkpoint", BUILD_LOCALLY)
    if isinstance(plan, BuildPlan) and isinstance(receipt, receipts.CheckpointReceipt):
        locked = plan.donor_sha256
        if locked not in (None, receipt.donor_sha256):
            problem = (
                f"has FP8 source tensors with sha256 {receipt.donor_sha256}, "
                f"but the lock has {locked}"
            )
            raise ValidationError(url, problem, BUILD_LOCALLY)
    return receipt
