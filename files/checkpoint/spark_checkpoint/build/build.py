"""Builds a checkpoint: gates, replacements, layout, index and config, receipt, one rename."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import Any

from spark_contract.files import now
from spark_contract.work.orders import RECIPE_VERSION, BuildPlan, DonorUrl
from spark_contract.work.receipts import CheckpointReceipt
from spark_contract.work.sharing import CopyPlan

from spark_checkpoint import TOOL_VERSION
from spark_checkpoint.build.base_hashes import base_proofs, compare_duplicates
from spark_checkpoint.build.config import result_config, usable
from spark_checkpoint.build.copied import copied
from spark_checkpoint.build.disk_room import peak_bytes
from spark_checkpoint.build.gated import Gated, donor_tensors, gate
from spark_checkpoint.build.layouts import Layout, Writer, finished, result_bytes
from spark_checkpoint.build.staging import Changes, Staging
from spark_checkpoint.build.tensors.grafting import graft_mtp
from spark_checkpoint.build.tensors.replacements import Surgery
from spark_checkpoint.format.header import Tensor
from spark_checkpoint.format.pieces import Proof
from spark_checkpoint.format.tree import (
    CONFIG_NAME,
    INDEX_NAME,
    QUANTIZATION_NAME,
    read_config,
    read_tree,
)
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.receipt import write_receipt
from spark_checkpoint.storage import clear, refuse_without_room, write_json
from spark_checkpoint.verify.expected import HEAD
from spark_checkpoint.verify.making import make_tree


def build(plan: BuildPlan, progress: Progress, copies: CopyPlan | None = None) -> bool:
    """Build the plan's tree, or copy it from a peer; return False when it was already there."""
    report: dict[str, Any] = {}

    def write(work: Path, tree_dir: Path) -> None:
        if copies is not None and copied(copies, plan, tree_dir, progress):
            return
        # Sources are let go of before the result is read again: names of a large model fill memory.
        report.update(_write_tree(plan, work, tree_dir, progress))

    made = make_tree(plan, f"plan {plan.digest[:12]}", progress, write)
    if made and report and plan.layout == "full":
        base_bytes = report["rebuild_fetch_bytes"]["base"]
        note(f"{plan.out_dir}: stands alone; without its base a rebuild fetches {base_bytes} bytes")
    return made


def _write_tree(plan: BuildPlan, work: Path, tree_dir: Path, progress: Progress) -> dict[str, Any]:
    """Write the whole tree with its receipt, and return the receipt's report."""
    url = plan.donor.url if isinstance(plan.donor, DonorUrl) else ""
    donor_dir = work / f"donor-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    clear(work, keep=frozenset({donor_dir.name}))
    progress.phase("gates")
    config = read_config(plan.base_dir)
    usable(config, str(plan.base_dir / CONFIG_NAME), plan.head)
    sources = gate(plan, read_tree(plan.base_dir), config)
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
    sources: Gated,
    taken: dict[str, Tensor],
    work: Path,
    donor_dir: Path,
    progress: Progress,
) -> Changes:
    """Have the bytes of every new tensor on this host."""
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
    plan: BuildPlan, sources: Gated, changes: Changes, layout: Layout, tree_dir: Path
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
        layout.files.append(finished(tree_dir, name, write_json(tree_dir / name, document)))


def _report(
    sources: Gated, proofs: dict[str, Proof], layout: Layout, taken: dict[str, Tensor]
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
