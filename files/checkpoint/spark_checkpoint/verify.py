"""Verify a checkpoint against its receipt, and publish a new one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from spark_contract.errors import HostToolError
from spark_contract.fetching import FetchPlan, growing_dir, growing_tree
from spark_contract.orders import BuildPlan, RequantizePlan
from spark_contract.paths import RECEIPT_NAME
from spark_contract.receipts import AnyReceipt, Receipt, ReceiptFile, SourceReceipt

from spark_checkpoint.errors import GateRefused, HeaderRefused, InputRefused, TreeDiffers
from spark_checkpoint.format.directory import files_of, no_garbage_collection, read_index
from spark_checkpoint.format.headers import read_header
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.receipt import (
    first_difference,
    load_receipt,
    pieces_of,
    vouched,
    write_receipt,
)
from spark_checkpoint.storage import WORKERS, clear, hash_file, publish, sole_use, stamp_of
from spark_checkpoint.tensor_sets import check_quantised_names, check_result_names

_FIX = "move the directory away and run the deploy again"


def verify_checkpoint(directory: Path, progress: Progress, *, full: bool) -> AnyReceipt:
    """Check a checkpoint directory and return its receipt.

    Quick: files, sizes, headers, index, and hashes of files whose stat differs from the receipt
    (the receipt is then updated). Full: the hash of every file.
    """
    if not directory.is_dir():
        raise InputRefused(str(directory), "is not a directory", "check the path")
    receipt = load_receipt(directory)
    if receipt is None:
        raise TreeDiffers(
            str(directory), f"has no {RECEIPT_NAME}: it was never finished", "run its job again"
        )
    check_files(directory, receipt)
    # A source is verified as bytes; only checkpoints made here have an exact tensor set.
    if not isinstance(receipt, SourceReceipt):
        with no_garbage_collection():
            _check_headers(directory, receipt, receipt.plan, receipt.tensors)
    to_hash = [file for file in receipt.files if full or file.is_touched(directory)]
    hashed = _check_hashes(directory, to_hash, progress)
    files = tuple(hashed.get(file.path, file) for file in receipt.files)
    if files != receipt.files:
        receipt = replace(receipt, files=files)
        _note_stats(directory, receipt)
    return receipt


def read_receipt_line(directory: Path) -> str:
    """Return the receipt in one line, unchecked."""
    receipt = load_receipt(directory)
    if receipt is None:
        return "none"
    of = receipt.name if isinstance(receipt, SourceReceipt) else receipt.plan.name
    return f"{receipt.kind} {of} digest {receipt.digest[:12]} of {receipt.written_at}"


def check_files(directory: Path, receipt: Receipt) -> None:
    for file in receipt.files:
        path = directory / file.path
        try:
            size = path.stat().st_size
        except OSError as error:
            raise TreeDiffers(str(path), f"is gone ({error.strerror})", _FIX) from error
        if size != file.size_bytes:
            raise TreeDiffers(
                str(path), f"has {size} bytes, the receipt says {file.size_bytes}", _FIX
            )
    surplus = set(files_of(directory)) - {file.path for file in receipt.files}
    if surplus:
        raise TreeDiffers(
            str(directory), f"holds files no receipt knows: {', '.join(sorted(surplus)[:5])}", _FIX
        )


def _check_headers(
    directory: Path, receipt: Receipt, plan: BuildPlan | RequantizePlan, tensors: int
) -> None:
    """Compare the index with every header, one at a time."""
    try:
        index = read_index(directory)
        if index is None:
            raise TreeDiffers(str(directory), "has no index", _FIX)
        listed: dict[str, list[str]] = {}
        for name, shard in index.items():
            listed.setdefault(shard, []).append(name)
        for file in receipt.files:
            if file.path.endswith(".safetensors"):
                header = read_header(directory / file.path)
                absent = [n for n in listed.pop(file.path, ()) if n not in header.tensors]
                if absent:
                    raise TreeDiffers(
                        str(directory), f"the index puts {absent[0]} into {file.path}", _FIX
                    )
    except GateRefused as error:
        kind = "a broken header" if isinstance(error, HeaderRefused) else "a broken index"
        raise TreeDiffers(error.where, f"{error.what} ({kind})", _FIX) from error
    if listed:
        missing = ", ".join(sorted(listed)[:3])
        raise TreeDiffers(str(directory), f"the index names files no receipt has: {missing}", _FIX)
    if len(index) != tensors:
        raise TreeDiffers(
            str(directory), f"the index lists {len(index)} tensors, the receipt {tensors}", _FIX
        )
    _check_names(directory, index, plan)


def _check_names(
    directory: Path, index: Mapping[str, str], plan: BuildPlan | RequantizePlan
) -> None:
    """Compare names with the plan of the receipt: an equal count may hide other names."""
    try:
        if isinstance(plan, BuildPlan):
            check_result_names(str(directory), index, plan, plan.layout)
        else:
            check_quantised_names(str(directory), index, plan)
    except HostToolError as error:
        raise TreeDiffers(error.where, error.what, _FIX) from error


def _note_stats(directory: Path, receipt: Receipt) -> None:
    """Save the stat of hashed files, so that the next run skips them."""
    try:
        write_receipt(directory, receipt)
    except OSError as error:
        note(f"{directory}: its receipt stays as it is ({error.strerror}): it is hashed next time")


def _check_hashes(
    directory: Path, files: list[ReceiptFile], progress: Progress
) -> dict[str, ReceiptFile]:
    """Return files by path, with their stat from before hashing."""
    progress.phase("verify", sum(file.size_bytes for file in files))

    def check_file(file: ReceiptFile) -> ReceiptFile:
        path = directory / file.path
        stamp = stamp_of(path)
        if file.sha256 is not None:
            found = hash_file(path, progress.add)
            if found != file.sha256:
                problem = f"has sha256 {found}, the receipt says {file.sha256}"
                raise TreeDiffers(str(path), problem, _FIX)
        elif (pieces := pieces_of(file)) is not None:
            begin = first_difference(path, pieces, progress.add)
            if begin is not None:
                problem = f"has other bytes than the receipt says in the piece from byte {begin}"
                raise TreeDiffers(str(path), problem, _FIX)
        else:
            raise TreeDiffers(str(path), "has no hash in the receipt", _FIX)
        if stamp_of(path) != stamp:
            raise TreeDiffers(str(path), "was changed while it was read", _FIX)
        return vouched(file.path, stamp, file.sha256, file.pieces, file.link_of)

    with ThreadPoolExecutor(WORKERS) as pool:
        return {file.path: file for file in pool.map(check_file, files)}


def make_checkpoint(
    plan: FetchPlan | BuildPlan | RequantizePlan,
    what: str,
    progress: Progress,
    write: Callable[[Path, Path], None],
) -> bool:
    """Create, verify and rename a plan's checkpoint; return False if it exists already.

    ``write(work_dir, checkpoint_dir)`` writes the checkpoint with its receipt. Its other files in
    the work directory survive an interruption.
    """
    work = growing_dir(plan.out_dir)
    if _is_there(plan, what, progress):
        shutil.rmtree(work, ignore_errors=True)
        return False
    with sole_use(work):
        # Another process may have finished before we got the lock.
        if _is_there(plan, what, progress):
            return False
        tree_dir = growing_tree(plan.out_dir)
        write(work, tree_dir)
        verify_checkpoint(tree_dir, progress, full=False)
        publish(tree_dir, plan.out_dir)
        clear(work)
        work.rmdir()
    return True


def _is_there(plan: FetchPlan | BuildPlan | RequantizePlan, what: str, progress: Progress) -> bool:
    if not plan.out_dir.exists():
        return False
    receipt = load_receipt(plan.out_dir)
    if receipt is None or receipt.digest != plan.digest:
        found = "has no receipt" if receipt is None else f"holds digest {receipt.digest[:12]}"
        raise GateRefused(
            str(plan.out_dir), f"{found}, so it is not ours to replace", "move it away, run again"
        )
    verify_checkpoint(plan.out_dir, progress, full=False)
    note(f"{plan.out_dir}: already holds {what}")
    return True
