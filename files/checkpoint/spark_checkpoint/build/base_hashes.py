"""What is known of the base's bytes before a build: its receipt, or hashes made now."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spark_contract.work.orders import BuildPlan
from spark_contract.work.receipts import AnyReceipt, ReceiptFile, RequantizedReceipt, SourceReceipt

from spark_checkpoint.errors import GateRefused, TreeDiffers
from spark_checkpoint.format.pieces import PIECE_BYTES, Piece, Proof, pieces_of, prove_file
from spark_checkpoint.format.tree import Tree, files_of
from spark_checkpoint.progress import Progress
from spark_checkpoint.receipt import load_receipt
from spark_checkpoint.storage import WORKERS, hash_file
from spark_checkpoint.verify.verify import check_files

_FIX = "delete the source directory and fetch it again"


def base_proofs(plan: BuildPlan, progress: Progress) -> dict[str, Proof]:
    """Return path → hashes of every base file.

    With a pinned revision they come from the source's receipt, after its commit, file set and
    sizes were checked; a file touched since it was fetched is hashed again, and so is one whose
    receipt lacks the pieces that *full* copies by. Without a revision every file is hashed here.
    """
    directory = plan.base_dir
    if plan.base.revision is None:
        return _prove_all(directory, files_of(directory), progress)
    receipt = vouching_for_base(plan)
    again = [
        file.path
        for file in receipt.files
        if file.is_touched(directory)
        or file.sha256 is None
        or (plan.layout == "full" and _pieces(file) is None)
    ]
    proofs = {
        file.path: Proof(file.sha256, _pieces(file) or ())
        for file in receipt.files
        if file.sha256 is not None
    }
    for name, proof in _prove_all(directory, again, progress).items():
        if name not in proofs or proof.sha256 != proofs[name].sha256:
            raise GateRefused(
                str(directory / name), "was changed after it was fetched and verified", _FIX
            )
        proofs[name] = proof
    return proofs


def vouching_for_base(plan: BuildPlan) -> AnyReceipt:
    """Return the receipt of the base, whole and of the revision that the plan names."""
    directory, wanted = plan.base_dir, plan.base.revision
    receipt = load_receipt(directory)
    if receipt is None or revision_of(receipt) != wanted:
        found = f"is {revision_of(receipt)}" if receipt else "has no receipt"
        kind, fix = "commit", "fetch the base at the locked commit"
        if len(wanted or "") > 40:
            kind, fix = "digest", "run `spark-deploy requantize`"
        what = f"{found}, the plan wants the verified tree of {kind} {wanted}"
        raise GateRefused(str(directory), what, fix)
    try:
        check_files(directory, receipt)
    except TreeDiffers as error:
        raise GateRefused(error.where, error.what, _FIX) from error
    return receipt


def revision_of(receipt: AnyReceipt) -> str | None:
    """Return what a plan may know a base by: a commit, or what it was quantised from."""
    if isinstance(receipt, SourceReceipt):
        return receipt.commit
    return receipt.digest if isinstance(receipt, RequantizedReceipt) else None


def compare_duplicates(base: Tree) -> dict[str, Any]:
    """Return how many names are in several shards, and how many of them differ in bytes."""
    differing = 0
    for name, shards in base.duplicates.items():
        spans = (base.span(name, shard) for shard in shards)
        hashes = {hash_file(path, offset=at, size_bytes=size) for path, at, size in spans}
        differing += len(hashes) > 1
    return {"names": len(base.duplicates), "differing": differing, "rule": "last file wins"}


def _pieces(file: ReceiptFile) -> tuple[Piece, ...] | None:
    """Return the pieces of a file; None when its receipt has none."""
    if file.pieces is None and file.sha256 is not None and file.size_bytes <= PIECE_BYTES:
        return (Piece(file.size_bytes, file.sha256),) if file.size_bytes else ()
    return pieces_of(file)


def _prove_all(directory: Path, names: list[str], progress: Progress) -> dict[str, Proof]:
    if names:
        progress.phase("hash-base", sum((directory / name).stat().st_size for name in names))
    with ThreadPoolExecutor(WORKERS) as pool:
        proofs = pool.map(lambda name: prove_file(directory / name, progress.add), names)
        return dict(zip(names, proofs, strict=True))
