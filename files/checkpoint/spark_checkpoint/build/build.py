"""Build a checkpoint from its base and FP8 source checkpoint, called the donor."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from spark_contract.fetching import CopyPlan
from spark_contract.files import now
from spark_contract.orders import RECIPE_VERSION, BuildPlan, DonorUrl
from spark_contract.receipts import (
    AnyReceipt,
    CheckpointReceipt,
    ReceiptFile,
    RequantizedReceipt,
    SourceReceipt,
)

from spark_checkpoint import TOOL_VERSION
from spark_checkpoint.build.layouts import (
    Layout,
    Writer,
    check_config,
    finished_file,
    result_bytes,
    result_config,
)
from spark_checkpoint.build.new_tensors import Surgery, graft_mtp
from spark_checkpoint.build.source_checks import Sources, check_sources, donor_tensors
from spark_checkpoint.build.write import Changes, Staging
from spark_checkpoint.errors import GateRefused, TreeDiffers
from spark_checkpoint.format.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    QUANTIZATION_NAME,
    Checkpoint,
    files_of,
    read_checkpoint,
    read_config,
)
from spark_checkpoint.format.headers import SIXTEEN_BIT, Tensor, tensor_bytes
from spark_checkpoint.format.numbers import GROUP, PACK
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.receipt import (
    PIECE_BYTES,
    Piece,
    Proof,
    load_receipt,
    pieces_of,
    prove_file,
    write_receipt,
)
from spark_checkpoint.sources.peers import copy_from_peer
from spark_checkpoint.storage import WORKERS, clear, hash_file, refuse_without_room, write_json
from spark_checkpoint.tensor_sets import HEAD, WEIGHT, swapped_modules
from spark_checkpoint.verify import check_files, make_checkpoint

_FIX = "delete the source directory and fetch it again"


def base_proofs(plan: BuildPlan, progress: Progress) -> dict[str, Proof]:
    """Return path → hashes of every base file.

    A pinned revision uses the source's receipt after checking commit, files and sizes; files with
    a changed stat, or without the pieces *full* needs, are hashed again. Without a revision every
    file is hashed.
    """
    directory = plan.base_dir
    if plan.base.revision is None:
        return _prove_all(directory, files_of(directory), progress)
    receipt = load_base_receipt(plan)
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


def load_base_receipt(plan: BuildPlan) -> AnyReceipt:
    """Return the receipt of a complete base at the plan's revision."""
    directory, wanted = plan.base_dir, plan.base.revision
    receipt = load_receipt(directory)
    if receipt is None or revision_of(receipt) != wanted:
        found = f"is {revision_of(receipt)}" if receipt else "has no receipt"
        kind, fix = "commit", "fetch the base at the locked commit"
        if len(wanted or "") > 40:
            kind, fix = "digest", "run `spark-deploy add --requantize`"
        what = f"{found}, the plan wants the verified tree of {kind} {wanted}"
        raise GateRefused(str(directory), what, fix)
    try:
        check_files(directory, receipt)
    except TreeDiffers as error:
        raise GateRefused(error.where, error.what, _FIX) from error
    return receipt


def revision_of(receipt: AnyReceipt) -> str | None:
    """Return a source's commit or a quantised checkpoint's digest."""
    if isinstance(receipt, SourceReceipt):
        return receipt.commit
    return receipt.digest if isinstance(receipt, RequantizedReceipt) else None


def compare_duplicates(base: Checkpoint) -> dict[str, Any]:
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


def peak_bytes(
    plan: BuildPlan, base: Checkpoint, received: Mapping[str, Tensor], grafted: Collection[str]
) -> int:
    """Return a build's peak disk use.

    ``received`` are staged donor tensors; those in ``grafted`` become 16-bit. New tensors are
    staged before they are written into the result.
    """
    staged = sum(tensor.size_bytes for tensor in received.values())
    weights = [base.tensor(module + WEIGHT) for module in swapped_modules(plan)]
    if plan.shared_experts == "fp8-self":
        staged += sum(_fp8_bytes(weight, plan.block_shape) for weight in weights)
    elif plan.shared_experts == "int8-g128":
        staged += sum(map(_int8_bytes, weights))
    if plan.head == "int8-g128":
        staged += _int8_bytes(base.tensor(HEAD))
    for name in grafted:
        entry = received[name]
        dtype = entry.dtype if entry.dtype in SIXTEEN_BIT else "BF16"
        staged += tensor_bytes(dtype, entry.shape)
    if plan.layout == "overlay":
        return 2 * staged
    whole = sum(header.data_start + header.data_bytes for header in base.shards.values())
    return 2 * staged + whole


def _int8_bytes(weight: Tensor) -> int:
    """Return the bytes of packed codes, scales and zero points of a weight."""
    outputs, inputs = weight.shape
    groups = inputs // GROUP
    return outputs * inputs + groups * outputs * 2 + groups * outputs // PACK * 4


def _fp8_bytes(weight: Tensor, block: tuple[int, int]) -> int:
    """Return the bytes of e4m3 codes and BF16 block scales of a weight."""
    rows, columns = weight.shape
    return rows * columns + -(-rows // block[0]) * -(-columns // block[1]) * 2


def build(plan: BuildPlan, progress: Progress, copies: CopyPlan | None = None) -> bool:
    """Build the plan's checkpoint or copy it from a peer; return False if it exists already."""
    report: dict[str, Any] = {}

    def write(work: Path, tree_dir: Path) -> None:
        if copies is not None and copy_from_peer(copies, plan, tree_dir, progress):
            return
        # Sources are freed before verification: names of a large model fill memory.
        report.update(_write_tree(plan, work, tree_dir, progress))

    made = make_checkpoint(plan, f"plan {plan.digest[:12]}", progress, write)
    if made and report and plan.layout == "full":
        base_bytes = report["rebuild_fetch_bytes"]["base"]
        note(f"{plan.out_dir}: stands alone; without its base a rebuild fetches {base_bytes} bytes")
    return made


def _write_tree(plan: BuildPlan, work: Path, tree_dir: Path, progress: Progress) -> dict[str, Any]:
    url = plan.donor.url if isinstance(plan.donor, DonorUrl) else ""
    donor_dir = work / f"donor-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    clear(work, keep=frozenset({donor_dir.name}))
    progress.phase("gates")
    config = read_config(plan.base_dir)
    check_config(config, str(plan.base_dir / CONFIG_NAME), plan.head)
    sources = check_sources(plan, read_checkpoint(plan.base_dir), config)
    proofs = base_proofs(plan, progress)
    taken = donor_tensors(plan, sources)
    peak = peak_bytes(plan, sources.base, taken, sources.mtp_missing)
    refuse_without_room(plan.out_dir.parent, peak, f"building {plan.name}")
    changes = make_changes(plan, sources, taken, work, donor_dir, progress)
    tree_dir.mkdir()
    writer = Writer(tree_dir, sources.base, proofs, changes, progress)
    layout = writer.overlay() if plan.layout == "overlay" else writer.full()
    _finish_tree(plan, sources, changes, layout, tree_dir)
    report = {**changes.report, **_report(sources, proofs, layout, taken)}
    receipt = CheckpointReceipt(
        kind="checkpoint",
        digest=plan.digest,
        files=tuple(layout.files),
        tool_version=TOOL_VERSION,
        written_at=now(),
        recipe_version=RECIPE_VERSION,
        plan=plan,
        tensors=len(layout.index),
        report=report,
    )
    write_receipt(tree_dir, receipt)
    return report


def make_changes(
    plan: BuildPlan,
    sources: Sources,
    taken: dict[str, Tensor],
    work: Path,
    donor_dir: Path,
    progress: Progress,
) -> Changes:
    changes = Changes()
    donor = sources.donor
    spans = donor.stage(taken, donor_dir, progress) if donor is not None and taken else {}
    with closing(Staging(work / "new-tensors")) as stage:
        surgery = Surgery(
            sources.base, sources.modules, plan.block_shape, taken, spans, stage, progress, changes
        )
        if plan.compares_with_donor:
            surgery.compare_with_donor()
            if plan.shared_experts == "fp8-donor":
                surgery.swap_from_donor()
        elif plan.shared_experts == "fp8-self":
            surgery.swap_by_own_fp8()
        elif plan.shared_experts == "int8-g128":
            surgery.swap_by_int8()
        if plan.head == "int8-g128":
            surgery.bake_head(HEAD)
        if sources.mtp_missing:
            graft_mtp(sources.mtp_missing, surgery)
    return changes


def _finish_tree(
    plan: BuildPlan, sources: Sources, changes: Changes, layout: Layout, tree_dir: Path
) -> None:
    """Write index and config, the last files before the receipt."""
    config = result_config(read_config(plan.base_dir), plan, layout.index, sources.modules)
    index = {
        "metadata": {"total_size": result_bytes(sources.base, changes)},
        "weight_map": {name: layout.index[name] for name in sorted(layout.index)},
    }
    documents = {INDEX_NAME: index, CONFIG_NAME: config}
    if (plan.base_dir / QUANTIZATION_NAME).exists():
        documents[QUANTIZATION_NAME] = config["quantization_config"]
    for name, document in documents.items():
        layout.files.append(finished_file(tree_dir, name, write_json(tree_dir / name, document)))


def _report(
    sources: Sources, proofs: dict[str, Proof], layout: Layout, taken: dict[str, Tensor]
) -> dict[str, Any]:
    donor_bytes = sum(tensor.size_bytes for tensor in taken.values())
    base_bytes = sum((sources.base.directory / path).stat().st_size for path in proofs)
    report: dict[str, Any] = {
        "rebuild_fetch_bytes": {"base": base_bytes, "donor": donor_bytes},
        "written_bytes": sum(f.size_bytes for f in layout.files if f.link_of is None),
        "linked_bytes": sum(f.size_bytes for f in layout.files if f.link_of is not None),
    }
    if sources.donor is not None:
        report["donor_received_bytes"] = sources.donor.received_bytes
    if sources.base.duplicates:
        report["duplicates"] = compare_duplicates(sources.base)
    return report
