"""Read and write receipts; create, verify and discard checkpoints."""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from spark_contract import documents, receipts
from spark_contract.builder_api import BuildPlan, RankPlan, RequantizePlan
from spark_contract.fetching import FetchPlan, partial_dir, partial_tree
from spark_contract.files import sync_directory
from spark_contract.paths import RECEIPT_NAME
from spark_contract.tool import HostToolError

from spark_checkpoint import InputError, ReceiptMismatchError, ValidationError, storage
from spark_checkpoint.directory import list_files, read_index
from spark_checkpoint.headers import read_header
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.storage import PIECE_BYTES, FileHashes, Piece, hash_with_pieces
from spark_checkpoint.tensor_sets import check_quantized_names, check_result_names

_SOURCE_FIX = "delete the source directory and download it again"
_FIX = "move the directory elsewhere and run the deploy again"


def parse_pieces(file: receipts.ReceiptFile) -> tuple[Piece, ...] | None:
    """Return the pieces of a file in a receipt, if any; raise ValueError if they are malformed."""
    if file.pieces is None:
        return None
    pieces = []
    for entry in file.pieces:
        size, _, sha256 = entry.partition(":")
        if int(size) <= 0 or len(sha256) != 64:
            raise ValueError(f"malformed piece {entry!r}, expected SIZE:SHA256")
        pieces.append(Piece(int(size), sha256))
    if sum(piece.size_bytes for piece in pieces) != file.size_bytes:
        raise ValueError(f"the sizes of the pieces do not add up to {file.size_bytes} bytes")
    return tuple(pieces)


def load_receipt(directory: Path) -> receipts.AnyReceipt | None:
    path = directory / RECEIPT_NAME
    try:
        receipt = receipts.parse(path.read_bytes())
        for file in receipt.files:
            parse_pieces(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ReceiptMismatchError(str(path), f"is not a valid receipt ({error})", _FIX) from error
    return receipt


def receipt_entry(
    path: str,
    stamp: storage.Stamp,
    sha256: str | None,
    piece_hashes: tuple[str, ...] | None = None,
    link_target: str | None = None,
) -> receipts.ReceiptFile:
    return receipts.ReceiptFile(
        path, stamp.size_bytes, sha256, stamp.modified_ns, piece_hashes, link_target, stamp.inode
    )


def write_receipt(directory: Path, receipt: receipts.Receipt) -> None:
    storage.write_json(directory / RECEIPT_NAME, documents.to_plain(receipt))


def verify_checkpoint(directory: Path, progress: Progress, *, full: bool) -> receipts.AnyReceipt:
    """Check the files, headers, index and hashes of a checkpoint, and return its receipt.

    Without ``full``, hash only files whose size, time or inode differs from the receipt. If the
    hashes match, update the receipt.
    """
    if not directory.is_dir():
        raise InputError(str(directory), "is not a directory", "check the path")
    receipt = load_receipt(directory)
    if receipt is None:
        fix = "run the job again"
        raise ReceiptMismatchError(str(directory), f"is incomplete: it has no {RECEIPT_NAME}", fix)
    check_files(directory, receipt)
    # Only builds and quantizations have a plan with exact names.
    if isinstance(receipt, (receipts.CheckpointReceipt, receipts.RequantizedReceipt)):
        _check_index(directory, receipt)
    to_hash = [file for file in receipt.files if full or file.may_have_changed(directory)]
    progress.start_phase("verify", sum(file.size_bytes for file in to_hash))
    with ThreadPoolExecutor(storage.WORKERS) as pool:
        hashed = pool.map(lambda file: _check_content(directory, file, progress), to_hash)
        entries = {file.path: file for file in hashed}
    files = tuple(entries.get(file.path, file) for file in receipt.files)
    if files != receipt.files:
        receipt = replace(receipt, files=files)
        try:
            write_receipt(directory, receipt)
        except OSError as error:
            message = f"cannot update the receipt ({error.strerror}); the next run will hash again"
            note(f"{directory}: {message}")
    return receipt


def check_files(directory: Path, receipt: receipts.Receipt) -> None:
    for file in receipt.files:
        path = directory / file.path
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ReceiptMismatchError(str(path), f"is missing ({error.strerror})", _FIX) from error
        if size != file.size_bytes:
            problem = f"has {size} bytes, but the receipt lists {file.size_bytes} bytes"
            raise ReceiptMismatchError(str(path), problem, _FIX)
    surplus = set(list_files(directory)) - {file.path for file in receipt.files}
    if surplus:
        names = ", ".join(sorted(surplus)[:5])
        problem = f"has files that are not in the receipt: {names}"
        raise ReceiptMismatchError(str(directory), problem, _FIX)


def _check_index(
    directory: Path, receipt: receipts.CheckpointReceipt | receipts.RequantizedReceipt
) -> None:
    """Compare the index with all headers and with the plan in the receipt."""
    where = str(directory)
    try:
        index = read_index(directory)
        if index is None:
            raise ReceiptMismatchError(where, "has no index", _FIX)
        _check_shards(directory, receipt, index)
        if len(index) != receipt.tensors:
            problem = (
                f"the index lists {len(index)} tensors, but the receipt lists {receipt.tensors}"
            )
            raise ReceiptMismatchError(where, problem, _FIX)
        if isinstance(receipt, receipts.CheckpointReceipt):
            check_result_names(where, index, receipt.plan, receipt.plan.layout)
        else:
            check_quantized_names(where, index, receipt.plan)
    except HostToolError as error:
        raise ReceiptMismatchError(error.where, error.what, _FIX) from error


def _check_shards(directory: Path, receipt: receipts.Receipt, index: Mapping[str, str]) -> None:
    names_by_shard: dict[str, list[str]] = {}
    for name, shard in index.items():
        names_by_shard.setdefault(shard, []).append(name)
    for file in receipt.files:
        if not file.path.endswith(".safetensors"):
            continue
        header = read_header(directory / file.path)
        for name in names_by_shard.pop(file.path, ()):
            if name not in header.tensors:
                problem = f"the index lists {name} in {file.path}, but that file lacks it"
                raise ReceiptMismatchError(str(directory), problem, _FIX)
    if names_by_shard:
        missing = ", ".join(sorted(names_by_shard)[:3])
        problem = f"the index lists files that are not in the receipt: {missing}"
        raise ReceiptMismatchError(str(directory), problem, _FIX)


def _check_content(
    directory: Path, file: receipts.ReceiptFile, progress: Progress
) -> receipts.ReceiptFile:
    path = directory / file.path
    stamp = storage.read_stamp(path)
    pieces = parse_pieces(file)
    problem = None
    if file.sha256 is not None:
        sha256 = storage.hash_file(path, progress.add)
        if sha256 != file.sha256:
            problem = f"has sha256 {sha256}, but the receipt lists {file.sha256}"
    elif pieces is not None:
        begin = 0
        for piece in pieces:
            if storage.hash_file(path, progress.add, begin, piece.size_bytes) != piece.sha256:
                problem = f"does not match the receipt in the piece starting at byte {begin}"
                break
            begin += piece.size_bytes
    else:
        problem = "has no hash in the receipt"
    if problem is None and storage.read_stamp(path) != stamp:
        problem = "changed while it was being read"
    if problem is not None:
        raise ReceiptMismatchError(str(path), problem, _FIX)
    return receipt_entry(file.path, stamp, file.sha256, file.pieces, file.link_of)


def create_checkpoint(
    plan: FetchPlan | BuildPlan | RequantizePlan | RankPlan,
    description: str,
    progress: Progress,
    write: Callable[[Path, Path], None],
) -> None:
    """Create, verify and publish a plan's checkpoint, unless it already exists.

    ``write(work_dir, result_dir)`` writes the checkpoint and its receipt. Files in ``work_dir``
    stay after an interruption, so that the next run can resume.
    """

    def verify_existing() -> bool:
        if not plan.out_dir.exists():
            return False
        receipt = load_receipt(plan.out_dir)
        if receipt is None or receipt.digest != plan.digest:
            problem = "has no receipt" if receipt is None else f"has digest {receipt.digest[:12]}"
            fix = "move the directory elsewhere, then run the command again"
            raise ValidationError(str(plan.out_dir), f"{problem}, so it was not replaced", fix)
        verify_checkpoint(plan.out_dir, progress, full=False)
        note(f"{plan.out_dir}: {description} already exists")
        return True

    work = partial_dir(plan.out_dir)
    if verify_existing():
        shutil.rmtree(work, ignore_errors=True)
        return
    with storage.lock_directory(work):
        # Another process may have created it while this process waited for the lock.
        if verify_existing():
            return
        result_dir = partial_tree(plan.out_dir)
        write(work, result_dir)
        verify_checkpoint(result_dir, progress, full=False)
        storage.publish(result_dir, plan.out_dir)
        storage.clear(work)
        work.rmdir()


def hash_base(
    plan: BuildPlan, rewritten: Collection[str], progress: Progress
) -> dict[str, FileHashes]:
    """Return the hashes of each base file, with the hashes of pieces for ``rewritten`` files.

    If the revision is pinned, take them from the receipt, and hash only changed files and files
    whose pieces it lacks.
    """
    directory = plan.base_dir
    if plan.base.revision is None:
        return _hash_files(directory, list_files(directory), progress)
    receipt = _load_base_receipt(plan)
    hashes: dict[str, FileHashes] = {}
    to_hash = []
    for file in receipt.files:
        pieces = _read_pieces(file)
        if file.sha256 is not None:
            stamp = storage.read_stamp(directory / file.path)
            hashes[file.path] = FileHashes(file.sha256, pieces or (), stamp)
        needs_pieces = plan.layout == "full" or file.path in rewritten
        lacks_hashes = file.sha256 is None or (needs_pieces and pieces is None)
        if lacks_hashes or file.may_have_changed(directory):
            to_hash.append(file.path)
    for name, actual in _hash_files(directory, to_hash, progress).items():
        if name not in hashes or actual.sha256 != hashes[name].sha256:
            raise ValidationError(
                str(directory / name), "was changed after its verification", _SOURCE_FIX
            )
        hashes[name] = actual
    return hashes


def check_unchanged(directory: Path, hashes: Mapping[str, FileHashes]) -> None:
    """Raise ValidationError if a base file changed after its hashes were verified."""
    for name, file in hashes.items():
        if storage.read_stamp(directory / name) != file.stamp:
            fix = "run the command again, and do not change the base during the build"
            raise ValidationError(str(directory / name), "changed during the build", fix)


def _load_base_receipt(plan: BuildPlan) -> receipts.AnyReceipt:
    """Return the base's receipt; raise ValidationError unless it has the plan's revision."""
    directory, required = plan.base_dir, plan.base.revision
    receipt = load_receipt(directory)
    revision = None
    if isinstance(receipt, receipts.SourceReceipt):
        revision = receipt.commit
    elif isinstance(receipt, receipts.RequantizedReceipt):
        revision = receipt.digest
    if receipt is None or revision != required:
        actual = f"has revision {revision}" if receipt else "has no receipt"
        fix = "download the base at the locked commit"
        if len(required or "") > 40:  # the digest of a requantized base
            fix = "run `spark-deploy add --requantize`"
        raise ValidationError(str(directory), f"{actual}, but the plan requires {required}", fix)
    try:
        check_files(directory, receipt)
    except ReceiptMismatchError as error:
        raise ValidationError(error.where, error.what, _SOURCE_FIX) from error
    return receipt


def _read_pieces(file: receipts.ReceiptFile) -> tuple[Piece, ...] | None:
    """Return the pieces of a file in a receipt, if known; a small file is a single piece."""
    if file.pieces is None and file.sha256 is not None and file.size_bytes <= PIECE_BYTES:
        return (Piece(file.size_bytes, file.sha256),) if file.size_bytes else ()
    return parse_pieces(file)


def _hash_files(directory: Path, names: list[str], progress: Progress) -> dict[str, FileHashes]:
    if names:
        progress.start_phase("hash-base", sum((directory / name).stat().st_size for name in names))
    with ThreadPoolExecutor(storage.WORKERS) as pool:
        hashes = pool.map(lambda name: hash_with_pieces(directory / name, progress.add), names)
        return dict(zip(names, hashes, strict=True))


def discard_base(base: Path, tree: Path, progress: Progress) -> None:
    """Remove ``base`` after verifying every byte of the full-layout checkpoint ``tree``."""
    if not base.exists():
        note(f"{base}: already removed")
        return
    receipt = verify_checkpoint(tree, progress, full=True)
    if not isinstance(receipt, receipts.CheckpointReceipt) or receipt.plan.layout != "full":
        raise ValidationError(str(tree), "is not a full-layout checkpoint", "keep the base")
    actual_base = receipt.plan.base_dir
    if actual_base != Path(os.path.abspath(base)):
        fix = f"pass {actual_base} as the base"
        raise ValidationError(str(tree), f"was built from {actual_base}, not from {base}", fix)
    if load_receipt(base) is None and any(base.iterdir()):
        fix = "remove the directory yourself"
        raise ValidationError(str(base), "has no receipt, so it was not removed", fix)
    freed_bytes = shared_bytes = 0
    base_receipt = base / RECEIPT_NAME
    # Remove the deepest paths first, but the receipt last, because it marks a managed directory.
    for path in sorted(base.rglob("*"), key=lambda path: (path == base_receipt, -len(path.parts))):
        if path.is_dir() and not path.is_symlink():
            os.rmdir(path)
            continue
        status = path.lstat()
        if status.st_nlink == 1:
            freed_bytes += status.st_size
        else:
            shared_bytes += status.st_size
        if path == base_receipt:
            sync_directory(base)
        os.unlink(path)
    os.rmdir(base)
    sync_directory(base.parent)
    message = f"{base}: removed, {freed_bytes} bytes freed"
    if shared_bytes:
        message += f"; hard links in other directories still use {shared_bytes} bytes"
    rebuild_bytes = sum(receipt.report.get("rebuild_fetch_bytes", {}).values())
    note(f"{message}; rebuilding {tree} would download {rebuild_bytes} bytes")
