"""Build a checkpoint from a base and a donor (the FP8 source checkpoint)."""

import hashlib
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_contract import receipts
from spark_contract.builder_api import RECIPE_VERSION, BuildPlan, DonorUrl
from spark_contract.fetching import CopyPlan, TransferOptions
from spark_contract.files import now

from spark_checkpoint import TOOL_VERSION, storage, tensor_sets, verify
from spark_checkpoint.build import layouts, source_checks
from spark_checkpoint.build.new_tensors import TensorMaker
from spark_checkpoint.build.ngram_table import find_tables, table_tensors
from spark_checkpoint.build.peer_tensors import check_locked_tensors, read_changes
from spark_checkpoint.build.write import Changes, Staging
from spark_checkpoint.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    QUANTIZATION_NAME,
    Checkpoint,
    Span,
    list_files,
    read_checkpoint,
    read_config,
)
from spark_checkpoint.errors import ReceiptMismatchError, ValidationError
from spark_checkpoint.headers import Tensor, tensor_bytes
from spark_checkpoint.number_formats import packed_bytes
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.sources.peers import BUILD_LOCALLY, copy_from_peer

_FIX = "delete the source directory and download it again"


def build(plan: BuildPlan, progress: Progress, copies: CopyPlan | None = None) -> bool:
    """Build the plan's checkpoint or copy it from a peer; return False if it already exists."""
    report: dict[str, Any] = {}

    def write(work: Path, result_dir: Path) -> None:
        job = _Build(plan, work, result_dir, progress)
        if copies is None or not copy_from_peer(
            copies, plan, result_dir, receipts.CheckpointReceipt, job.copy
        ):
            # The sources are freed when write() returns: verification needs that memory.
            report.update(job.write())

    is_new = verify.create_checkpoint(plan, f"plan {plan.digest[:12]}", progress, write)
    if is_new and report and plan.layout == "full":
        base_bytes = report["rebuild_fetch_bytes"]["base"]
        note(
            f"{plan.out_dir}: the base can be removed; "
            f"a rebuild would then download {base_bytes} bytes"
        )
    return is_new


@dataclass(frozen=True, slots=True)
class _Build:
    """Writes the checkpoint of a plan to ``result_dir``, with temporary files in ``work``."""

    plan: BuildPlan
    work: Path
    result_dir: Path
    progress: Progress

    def write(self) -> dict[str, Any]:
        plan = self.plan
        url = plan.donor.url if isinstance(plan.donor, DonorUrl) else ""
        donor_dir = self.work / f"donor-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
        storage.clear(self.work, keep=frozenset({donor_dir.name}))
        self.progress.start_phase("check-sources")
        config = read_config(plan.base_dir)
        layouts.check_config(config, str(plan.base_dir / CONFIG_NAME), plan.head)
        sources = source_checks.check_sources(plan, read_checkpoint(plan.base_dir), config)
        base = sources.base
        hashes = hash_base(plan, rewritten_shards(plan, base), self.progress)
        required = source_checks.required_donor_tensors(plan, sources)
        peak = peak_bytes(plan, base, required, sources.mtp_missing)
        storage.check_free_space(plan.out_dir.parent, peak, f"building {plan.name}")
        spans, donor_sha256 = self._stage_donor(sources, required, donor_dir)
        changes = self._make_changes(sources, required, spans)
        self.result_dir.mkdir()
        layout = self._write_files(sources, hashes, changes)
        donor_bytes = sum(tensor.size_bytes for tensor in required.values())
        report = _make_report(plan.base_dir, hashes, changes, donor_bytes)
        self._write_receipt(layout, report, donor_sha256)
        return report

    def copy(
        self, transfer: TransferOptions, files_url: str, receipt: receipts.CheckpointReceipt
    ) -> None:
        """Write the result with a peer's new tensors; its files must match the peer's receipt."""
        plan = self.plan
        config = read_config(plan.base_dir)
        layouts.check_config(config, str(plan.base_dir / CONFIG_NAME), plan.head)
        base = read_checkpoint(plan.base_dir)
        hashes = hash_base(plan, rewritten_shards(plan, base), self.progress)
        sources, changes = read_changes(
            transfer, files_url, plan, base, config, self.work, self.progress
        )
        check_locked_tensors(files_url, plan, sources, changes, receipt.donor_sha256)
        rewritten = (base.shards[name] for name in rewritten_shards(plan, base))
        size_bytes = changes.size_bytes + sum(header.file_bytes for header in rewritten)
        storage.check_free_space(self.result_dir, size_bytes, f"copying {plan.name}")
        layout = self._write_files(sources, hashes, changes)
        actual, expected = (
            {(file.path, file.size_bytes, file.sha256, file.pieces) for file in files}
            for files in (layout.files, receipt.files)
        )
        if actual != expected:
            names = ", ".join(sorted({file[0] for file in actual ^ expected})[:5])
            problem = f"differs from base and plan in {names}"
            raise ValidationError(files_url, problem, BUILD_LOCALLY)
        report = _make_report(plan.base_dir, hashes, changes, changes.size_bytes)
        self._write_receipt(layout, report, receipt.donor_sha256)

    def _write_files(
        self, sources: source_checks.Sources, hashes: dict[str, verify.FileHashes], changes: Changes
    ) -> layouts.Layout:
        base, plan = sources.base, self.plan
        if plan.ngram_table != "keep":
            changes.added.update({name: [] for name in table_tensors(base)})
        writer = layouts.Writer(self.result_dir, base, hashes, changes, self.progress)
        if plan.layout == "overlay":
            layout = writer.write_overlay(rewritten_shards(plan, base))
        else:
            layout = writer.write_full()
        for table in find_tables(base, plan.ngram_table):
            written = table.write(self.result_dir, self.progress)
            layout.files.append(layouts.make_entry(table.file_name, written))
        self._write_documents(sources, changes, layout)
        return layout

    def _write_receipt(
        self, layout: layouts.Layout, report: dict[str, Any], donor_sha256: str | None
    ) -> None:
        receipt = receipts.CheckpointReceipt(
            kind="checkpoint",
            digest=self.plan.digest,
            files=tuple(layout.files),
            tool_version=TOOL_VERSION,
            written_at=now(),
            recipe_version=RECIPE_VERSION,
            plan=self.plan,
            tensors=len(layout.index),
            report=report,
            donor_sha256=donor_sha256,
        )
        verify.write_receipt(self.result_dir, receipt)

    def _stage_donor(
        self, sources: source_checks.Sources, required: dict[str, Tensor], donor_dir: Path
    ) -> tuple[dict[str, Span], str | None]:
        """Download the donor's tensors; return their locations, and their hash for the lock."""
        plan = self.plan
        if sources.donor is None or not required:
            return {}, None
        spans = sources.donor.stage(required, donor_dir, self.progress)
        sha256 = source_checks.hash_tensors(required, spans)
        if isinstance(plan.donor, DonorUrl) and plan.donor.sha256 not in (None, sha256):
            # The next run must not reuse these bytes.
            shutil.rmtree(donor_dir)
            raise ValidationError(
                plan.donor.url,
                f"sent tensors with sha256 {sha256}, but the lock has {plan.donor.sha256}",
                "check whether the hub or a proxy changed the content, then run the command again; "
                "if the lock is wrong, delete donor_sha256 of this build in the lock file",
            )
        return spans, sha256

    def _make_changes(
        self, sources: source_checks.Sources, required: dict[str, Tensor], spans: dict[str, Span]
    ) -> Changes:
        plan = self.plan
        changes = Changes()
        with closing(Staging(self.work / "new-tensors")) as stage:
            base, modules, block = sources.base, sources.modules, plan.block_shape
            maker = TensorMaker(
                base, modules, block, required, spans, stage, self.progress, changes
            )
            if plan.compares_with_donor:
                maker.compare_with_donor()
                if plan.shared_experts == "fp8-donor":
                    maker.swap_from_donor()
            elif plan.shared_experts == "fp8-self":
                maker.swap_to_fp8()
            elif plan.shared_experts == "int8-g128":
                maker.swap_to_int8()
            if plan.head == "int8-g128":
                maker.pack_head(tensor_sets.HEAD)
            if sources.mtp_missing:
                maker.graft_mtp(sources.mtp_missing)
            if plan.drafter_int4:
                maker.pack_drafter(tensor_sets.drafter_weights(plan))
        return changes

    def _write_documents(
        self, sources: source_checks.Sources, changes: Changes, layout: layouts.Layout
    ) -> None:
        config = layouts.result_config(
            read_config(self.plan.base_dir), self.plan, layout.index, sources.modules
        )
        index = {
            "metadata": {"total_size": layouts.result_bytes(sources.base, changes)},
            "weight_map": {name: layout.index[name] for name in sorted(layout.index)},
        }
        documents = {INDEX_NAME: index, CONFIG_NAME: config}
        if (self.plan.base_dir / QUANTIZATION_NAME).exists():
            documents[QUANTIZATION_NAME] = config["quantization_config"]
        for name, document in documents.items():
            sha256 = storage.write_json(self.result_dir / name, document)
            layout.files.append(
                verify.receipt_entry(name, storage.read_stamp(self.result_dir / name), sha256)
            )


def _make_report(
    base_dir: Path, base_files: Collection[str], changes: Changes, donor_bytes: int
) -> dict[str, Any]:
    base_bytes = sum((base_dir / path).stat().st_size for path in base_files)
    sizes = {"base": base_bytes, "donor": donor_bytes}
    return {**changes.report, "rebuild_fetch_bytes": sizes}


def hash_base(
    plan: BuildPlan, rewritten: Collection[str], progress: Progress
) -> dict[str, verify.FileHashes]:
    """Return the hashes of each base file, with pieces for ``rewritten`` files.

    For a pinned revision, they come from the receipt, except for changed files and missing pieces.
    """
    directory = plan.base_dir
    if plan.base.revision is None:
        return _hash_files(directory, list_files(directory), progress)
    receipt = _load_base_receipt(plan)
    hashes: dict[str, verify.FileHashes] = {}
    to_hash = []
    for file in receipt.files:
        pieces = _read_pieces(file)
        if file.sha256 is not None:
            hashes[file.path] = verify.FileHashes(file.sha256, pieces or ())
        needs_pieces = plan.layout == "full" or file.path in rewritten
        lacks_hashes = file.sha256 is None or (needs_pieces and pieces is None)
        if lacks_hashes or file.may_have_changed(directory):
            to_hash.append(file.path)
    for name, actual in _hash_files(directory, to_hash, progress).items():
        if name not in hashes or actual.sha256 != hashes[name].sha256:
            raise ValidationError(str(directory / name), "was changed after its verification", _FIX)
        hashes[name] = actual
    return hashes


def _load_base_receipt(plan: BuildPlan) -> receipts.AnyReceipt:
    """Return the base's receipt; raise ValidationError unless it has the plan's revision."""
    directory, required = plan.base_dir, plan.base.revision
    receipt = verify.load_receipt(directory)
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
        verify.check_files(directory, receipt)
    except ReceiptMismatchError as error:
        raise ValidationError(error.where, error.what, _FIX) from error
    return receipt


def _read_pieces(file: receipts.ReceiptFile) -> tuple[verify.Piece, ...] | None:
    """Return the pieces of a file in a receipt, if known; a small file is a single piece."""
    if file.pieces is None and file.sha256 is not None and file.size_bytes <= verify.PIECE_BYTES:
        return (verify.Piece(file.size_bytes, file.sha256),) if file.size_bytes else ()
    return verify.parse_pieces(file)


def _hash_files(
    directory: Path, names: list[str], progress: Progress
) -> dict[str, verify.FileHashes]:
    if names:
        progress.start_phase("hash-base", sum((directory / name).stat().st_size for name in names))
    with ThreadPoolExecutor(storage.WORKERS) as pool:
        hashes = pool.map(
            lambda name: verify.hash_with_pieces(directory / name, progress.add), names
        )
        return dict(zip(names, hashes, strict=True))


def rewritten_shards(plan: BuildPlan, base: Checkpoint) -> set[str]:
    """Return the base's shards that the result cannot use unchanged.

    In an overlay, these are the shards of a packed drafter and of n-gram tables, because engines
    load whole files.
    """
    if plan.layout == "full":
        return set(base.shards)
    names = [name for name in tensor_sets.drafter_weights(plan) if name in base.owner]
    names += table_tensors(base) if plan.ngram_table != "keep" else []
    return {shard for name in names for shard in base.duplicates.get(name, (base.owner[name],))}


def peak_bytes(
    plan: BuildPlan, base: Checkpoint, received: Mapping[str, Tensor], grafted: Collection[str]
) -> int:
    """Return the peak disk use of a build, which stages new tensors and copies them to the result.

    ``received`` are the donor's tensors; ``grafted`` are the names of those that become 16-bit.
    """
    staged_bytes = sum(tensor.size_bytes for tensor in received.values())
    weights = [
        base.tensor(module + tensor_sets.WEIGHT) for module in tensor_sets.swapped_modules(plan)
    ]
    if plan.shared_experts == "int8-g128":
        staged_bytes += sum(packed_bytes(weight.shape, 8) for weight in weights)
    elif plan.shared_experts == "fp8-self":
        for weight in weights:
            grid = tensor_sets.block_grid(weight.shape, plan.block_shape)
            staged_bytes += tensor_bytes(tensor_sets.FP8, weight.shape) + tensor_bytes("BF16", grid)
    if plan.head == "int8-g128":
        staged_bytes += packed_bytes(base.tensor(tensor_sets.HEAD).shape, 8)
    for name in tensor_sets.drafter_weights(plan):
        weight = received[name] if name in grafted else base.tensor(name)
        staged_bytes += packed_bytes(weight.shape, 4)
    staged_bytes += sum(tensor_bytes("BF16", received[name].shape) for name in grafted)
    shards = (base.shards[name] for name in rewritten_shards(plan, base))
    tables = sum(table.file_bytes for table in find_tables(base, plan.ngram_table))
    return 2 * staged_bytes + sum(header.file_bytes for header in shards) + tables
