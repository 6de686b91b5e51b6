"""Build a checkpoint from a base and a donor, which is the FP8 source checkpoint."""

import hashlib
import shutil
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_contract import receipts
from spark_contract.builder_api import RECIPE_VERSION, BuildPlan, DonorUrl
from spark_contract.fetching import CopyPlan, TransferOptions
from spark_contract.files import now

from spark_checkpoint import TOOL_VERSION, ValidationError, storage, tensor_sets, verify
from spark_checkpoint.build import layouts
from spark_checkpoint.build.new_tensors import TensorMaker
from spark_checkpoint.build.ngram_table import find_tables, size_change_bytes, table_tensors
from spark_checkpoint.build.source_checks import (
    Sources,
    check_base_names,
    check_graftable,
    check_sources,
    hash_tensors,
    read_sizes,
    required_donor_tensors,
)
from spark_checkpoint.build.write import GRAFTED, Changes, NewTensor, Staging
from spark_checkpoint.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    QUANTIZATION_NAME,
    Checkpoint,
    Span,
    read_checkpoint,
    read_config,
)
from spark_checkpoint.headers import SIXTEEN_BIT, Tensor, tensor_bytes
from spark_checkpoint.number_formats import WORD_BITS, packed_bytes, packed_tensors
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.sources.donor import UrlDonor
from spark_checkpoint.sources.peers import BUILD_LOCALLY, copy_from_peer


def build(plan: BuildPlan, progress: Progress, copies: CopyPlan | None = None) -> None:
    """Build the plan's checkpoint or copy it from a peer, unless it already exists."""
    report: dict[str, Any] = {}

    def write(work: Path, result_dir: Path) -> None:
        job = _Build(plan, work, result_dir, progress)
        is_copied = copies is not None and copy_from_peer(
            copies, plan, result_dir, receipts.CheckpointReceipt, job.copy
        )
        if not is_copied:
            # job.write() frees the sources on return, because verification needs the memory.
            report.update(job.write())

    verify.create_checkpoint(plan, f"plan {plan.digest[:12]}", progress, write)
    if report and plan.layout == "full":
        base_bytes = report["rebuild_fetch_bytes"]["base"]
        note(
            f"{plan.out_dir}: the base is no longer needed; "
            f"if you remove it, a rebuild must download {base_bytes} bytes again"
        )


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
        layouts.check_config(config, str(plan.base_dir / CONFIG_NAME), plan)
        sources = check_sources(plan, read_checkpoint(plan.base_dir), config)
        base = sources.base
        hashes = verify.hash_base(plan, rewritten_shards(plan, base), self.progress)
        required = required_donor_tensors(plan, sources)
        peak = peak_bytes(plan, base, required, sources.mtp_missing) - storage.used_bytes(donor_dir)
        storage.check_free_space(plan.out_dir.parent, peak, f"building {plan.name}")
        spans, donor_sha256 = self._stage_donor(sources, required, donor_dir)
        try:
            changes = self._make_changes(sources, required, spans)
        except ValidationError:
            # The next run must not reuse the donor's bytes, because they may be damaged.
            shutil.rmtree(donor_dir, ignore_errors=True)
            raise
        self.result_dir.mkdir()
        layout = self._write_files(sources, hashes, changes)
        donor_bytes = sum(tensor.size_bytes for tensor in required.values())
        report = _make_report(plan.base_dir, hashes, changes, donor_bytes)
        self._write_receipt(layout, report, donor_sha256)
        return report

    def copy(
        self, transfer: TransferOptions, files_url: str, receipt: receipts.CheckpointReceipt
    ) -> None:
        """Write the result with a peer's new tensors; all files must match the peer's receipt."""
        plan = self.plan
        config = read_config(plan.base_dir)
        layouts.check_config(config, str(plan.base_dir / CONFIG_NAME), plan)
        base = read_checkpoint(plan.base_dir)
        hashes = verify.hash_base(plan, rewritten_shards(plan, base), self.progress)
        sources, changes = _read_changes(
            transfer, files_url, plan, base, config, self.work, self.progress
        )
        _check_locked_tensors(files_url, plan, sources, changes, receipt.donor_sha256)
        rewritten = (base.shards[name] for name in rewritten_shards(plan, base))
        size_bytes = changes.size_bytes + size_change_bytes(base, plan.ngram_table)
        size_bytes += sum(header.file_bytes for header in rewritten)
        storage.check_free_space(self.result_dir, size_bytes, f"copying {plan.name}")
        layout = self._write_files(sources, hashes, changes)
        actual, expected = (
            {(file.path, file.size_bytes, file.sha256, file.pieces) for file in files}
            for files in (layout.files, receipt.files)
        )
        if actual != expected:
            names = ", ".join(sorted({path for path, *_ in actual ^ expected})[:5])
            problem = f"has files that do not match the base and the plan: {names}"
            raise ValidationError(files_url, problem, BUILD_LOCALLY)
        report = _make_report(plan.base_dir, hashes, changes, changes.size_bytes)
        self._write_receipt(layout, report, receipt.donor_sha256)

    def _write_files(
        self,
        sources: Sources,
        hashes: dict[str, storage.FileHashes],
        changes: Changes,
    ) -> layouts.Layout:
        base, plan = sources.base, self.plan
        if plan.ngram_table != "keep":
            # Remove the tables' tensors, because each table gets its own file below.
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
        verify.check_unchanged(base.directory, hashes)
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
        self, sources: Sources, required: dict[str, Tensor], donor_dir: Path
    ) -> tuple[dict[str, Span], str | None]:
        """Download the donor's tensors; return their locations, and a hash for the lock file."""
        plan = self.plan
        if sources.donor is None or not required:
            return {}, None
        spans = sources.donor.stage(required, donor_dir, self.progress)
        sha256 = hash_tensors(required, spans)
        if isinstance(plan.donor, DonorUrl) and plan.donor.sha256 not in (None, sha256):
            # The next run must not reuse these bytes.
            shutil.rmtree(donor_dir)
            raise ValidationError(
                plan.donor.url,
                f"sent tensors with sha256 {sha256}, but the lock has {plan.donor.sha256}",
                "check whether the hub or a proxy changed the content, then run the command again; "
                "if the lock is wrong, delete this build's donor_sha256 from the lock file",
            )
        return spans, sha256

    def _make_changes(
        self, sources: Sources, required: dict[str, Tensor], spans: dict[str, Span]
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

    def _write_documents(self, sources: Sources, changes: Changes, layout: layouts.Layout) -> None:
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


def rewritten_shards(plan: BuildPlan, base: Checkpoint) -> set[str]:
    """Return the base's shards that the result cannot use unchanged.

    In an overlay, these are the shards of a packed drafter and of n-gram tables: engines load whole
    files, so the replaced tensors must not remain in them.
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

    ``received`` are the required donor tensors; ``grafted`` names those to add as 16-bit tensors.
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
    tables = size_change_bytes(base, plan.ngram_table)
    return 2 * staged_bytes + sum(header.file_bytes for header in shards) + tables


def _read_changes(
    transfer: TransferOptions,
    files_url: str,
    plan: BuildPlan,
    base: Checkpoint,
    config: Mapping[str, Any],
    work: Path,
    progress: Progress,
) -> tuple[Sources, Changes]:
    """Download the new tensors of a peer's result; names, dtypes and shapes must match the plan."""
    modules = tensor_sets.swapped_modules(plan)
    sources = Sources(base, None, modules, check_base_names(plan, base, modules))
    replacements = tensor_sets.replacement_names(plan)
    new = {old: names for old, names in replacements.items() if old in base.owner}
    grafted = [name for old in sources.mtp_missing for name in replacements.get(old, (old,))]
    all_new = [name for names in (*new.values(), grafted) for name in names]
    peer_names = {
        name: tensor_sets.overlay_name(name) if plan.layout == "overlay" else name
        for name in all_new
    }
    if not peer_names:
        return sources, Changes()
    donor = UrlDonor(
        DonorUrl(
            url=files_url,
            tries=transfer.tries,
            token_file=transfer.token_file,
            timeout_s=transfer.timeout_s,
        ),
        direct=True,
    )
    present = donor.names.intersection(peer_names.values())
    tensor_sets.check_same_names(files_url, "new tensors", present, peer_names.values())
    headers = donor.tensors(peer_names.values())
    entries = {name: headers[peer_names[name]] for name in peer_names}
    _check_entries(plan, sources, config, entries)
    size_bytes = sum(entry.size_bytes for entry in entries.values())
    storage.check_free_space(work, size_bytes, f"copying {plan.name}")
    directory = work / "peer-tensors"
    shutil.rmtree(directory, ignore_errors=True)
    staged = donor.stage(headers, directory, progress)
    spans = {name: staged[peer_names[name]] for name in peer_names}

    def new_tensor(name: str) -> NewTensor:
        return NewTensor(name, entries[name].dtype, entries[name].shape, spans[name])

    changes = Changes({old: [new_tensor(name) for name in names] for old, names in new.items()})
    if grafted:
        changes.added[GRAFTED] = [new_tensor(name) for name in grafted]
    if plan.shared_experts == "fp8-donor":
        with closing(Staging(work / "new-tensors")) as stage:
            TensorMaker(
                base, modules, plan.block_shape, entries, spans, stage, progress, changes
            ).compare_with_donor()
    return sources, changes


def _check_locked_tensors(
    where: str,
    plan: BuildPlan,
    sources: Sources,
    changes: Changes,
    receipt_sha256: str | None,
) -> None:
    """Compare the FP8 tensors with the receipt's hash, unless the hash also covers MTP tensors."""
    if plan.shared_experts != "fp8-donor" or sources.mtp_missing:
        return
    new = [
        tensor
        for module in sources.modules
        for tensor in changes.added[module + tensor_sets.WEIGHT]
    ]
    sha256 = hash_tensors(
        {tensor.name: tensor for tensor in new}, {tensor.name: tensor.span for tensor in new}
    )
    if sha256 != receipt_sha256:
        problem = f"sent FP8 tensors with sha256 {sha256}, but the receipt has {receipt_sha256}"
        raise ValidationError(where, problem, BUILD_LOCALLY)


def _check_entries(
    plan: BuildPlan,
    sources: Sources,
    config: Mapping[str, Any],
    entries: Mapping[str, Tensor],
) -> None:
    """Check the dtypes and shapes in the headers of a peer's new tensors."""
    base, weights = sources.base, {}
    for old, names in tensor_sets.replacement_names(plan).items():
        if not names:  # n-gram tables are not copied
            continue
        module = old.removesuffix(tensor_sets.WEIGHT)
        if names == (module + tensor_sets.WEIGHT, module + tensor_sets.SCALE):
            weight, scale = (entries[name] for name in names)
            shape = base.tensor(old).shape
            tensor_sets.check_fp8_weight(f"peer {module}", shape, weight, scale, plan.block_shape)
            continue
        packed = entries[names[0]]
        bits = 4 if old.startswith(tensor_sets.MTP_PREFIX) else 8
        if len(packed.shape) != 2:
            raise ValidationError(f"peer {names[0]}", "is not a matrix", BUILD_LOCALLY)
        weight_shape = (packed.shape[1], packed.shape[0] * WORD_BITS // bits)
        shape = base.tensor(old).shape if old in base.owner else weight_shape
        expected = packed_tensors(shape, bits)
        for name, dtype_and_shape in zip(names, expected.values(), strict=True):
            if entries[name].dtype_and_shape != dtype_and_shape:
                problem = f"is {entries[name].dtype_and_shape}, expected {dtype_and_shape}"
                raise ValidationError(f"peer {name}", problem, BUILD_LOCALLY)
        weights[old] = Tensor("BF16", weight_shape, 0, 0)
    for name in sources.mtp_missing:
        entry = weights[name] = weights.get(name) or entries[name]
        if entry.dtype not in SIXTEEN_BIT:
            problem = f"is {entry.dtype}, expected 16 bits"
            raise ValidationError(f"peer {name}", problem, BUILD_LOCALLY)
    check_graftable(sources.mtp_missing, weights, read_sizes(base, config), plan.block_shape)
