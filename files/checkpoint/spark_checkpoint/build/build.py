"""Builds a checkpoint: gates, replacements, layout, index and config, receipt, one rename."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_contract.files import now
from spark_contract.orders import RECIPE_VERSION, BuildPlan, DonorUrl
from spark_contract.patterns import expand_all, uses_up
from spark_contract.receipts import CheckpointReceipt

from spark_checkpoint import TOOL_VERSION
from spark_checkpoint.build.base_hashes import base_proofs, compare_duplicates
from spark_checkpoint.build.config import result_config, usable
from spark_checkpoint.build.disk_room import peak_bytes
from spark_checkpoint.build.grafting import graft_mtp, graftable, model_sizes
from spark_checkpoint.build.layouts import Layout, Writer, finished, result_bytes
from spark_checkpoint.build.replacements import Surgery, scale_of
from spark_checkpoint.build.staging import Changes, Staging
from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.header import Tensor
from spark_checkpoint.format.pieces import Proof
from spark_checkpoint.format.tree import (
    CONFIG_NAME,
    INDEX_NAME,
    QUANTIZATION_NAME,
    Tree,
    read_config,
    read_tree,
)
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.receipt import write_receipt
from spark_checkpoint.sources.donor import Donor, open_donor
from spark_checkpoint.storage import clear, refuse_without_room, write_json
from spark_checkpoint.verify.expected import HEAD, base_patterns, swapped
from spark_checkpoint.verify.gates import (
    MTP_PREFIX,
    SCALE,
    WEIGHT,
    donor_as_planned,
    donor_unmatched,
    fp8_fits,
    packable,
    planned_shapes,
    same_names,
    swappable,
)
from spark_checkpoint.verify.making import make_tree


@dataclass(frozen=True, slots=True)
class Sources:
    """The gated inputs of a build."""

    base: Tree
    proofs: dict[str, Proof]
    donor: Donor | None
    modules: list[str]
    mtp_missing: list[str]


def build(plan: BuildPlan, progress: Progress) -> bool:
    """Build the plan's tree; return False when it was already there."""
    report: dict[str, Any] = {}

    def write(work: Path, tree_dir: Path) -> None:
        # Sources are let go of before the result is read again: names of a large model fill memory.
        report.update(_write_tree(plan, work, tree_dir, progress))

    made = make_tree(plan, f"plan {plan.digest[:12]}", progress, write)
    if made and plan.layout == "full":
        base_bytes = report["rebuild_fetch_bytes"]["base"]
        note(f"{plan.out_dir}: stands alone; without its base a rebuild fetches {base_bytes} bytes")
    return made


def _write_tree(plan: BuildPlan, work: Path, tree_dir: Path, progress: Progress) -> dict[str, Any]:
    """Write the whole tree with its receipt, and return the receipt's report."""
    url = plan.donor.url if isinstance(plan.donor, DonorUrl) else ""
    donor_dir = work / f"donor-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    clear(work, keep=frozenset({donor_dir.name}))
    sources = open_sources(plan, progress)
    taken = _donor_tensors(plan, sources)
    peak = peak_bytes(plan, sources.base, taken, sources.mtp_missing)
    refuse_without_room(plan.out_dir.parent, peak, f"building {plan.name}")
    changes = make_changes(plan, sources, taken, work, donor_dir, progress)
    tree_dir.mkdir()
    writer = Writer(tree_dir, sources.base, sources.proofs, changes, progress)
    layout = writer.overlay() if plan.layout == "overlay" else writer.full()
    _finish_tree(plan, sources, changes, layout, tree_dir)
    report = {**changes.report, **_report(sources, layout, taken)}
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


def open_sources(plan: BuildPlan, progress: Progress) -> Sources:
    """Open base and donor and hold them against the plan's exact sets."""
    progress.phase("gates")
    base = read_tree(plan.base_dir)
    usable(read_config(plan.base_dir), str(plan.base_dir / CONFIG_NAME), plan.head)
    modules = swapped(plan)
    mtp_missing = _gate_base_names(plan, base, modules)
    if plan.shared_experts == "fp8-base":
        for module in modules:
            weight, scale = base.tensor(module + WEIGHT), base.tensor(module + SCALE)
            fp8_fits(f"base {module}", weight.shape, weight, scale, plan.block_shape)
    elif plan.shared_experts != "keep":
        swappable(plan.base_dir, {m + WEIGHT: base.tensor(m + WEIGHT) for m in modules})
    if plan.shared_experts == "int8-g128":
        for module in modules:
            packable(module + WEIGHT, base.tensor(module + WEIGHT), head=False)
    if plan.head == "int8-g128":
        packable(HEAD, base.tensor(HEAD), head=True)
    donor = _open_donor(plan, base, modules, mtp_missing)
    proofs = base_proofs(plan, progress)
    return Sources(base, proofs, donor, modules, mtp_missing)


def _gate_base_names(plan: BuildPlan, base: Tree, modules: list[str]) -> list[str]:
    """Refuse a base with other names than the plan's; return the MTP names it lacks.

    A large model's expected names fill memory: they are only all made for the refusal.
    """
    names, where = base.owner.keys(), str(plan.base_dir)
    patterns = base_patterns(plan)
    mtp_found = {name for name in names if name.startswith(MTP_PREFIX)}
    if not uses_up({name for name in names if name not in mtp_found}, patterns):
        same_names(where, "base tensors", names - mtp_found, expand_all(patterns))
    mtp_expected = expand_all(plan.mtp_tensors)
    if mtp_found - mtp_expected:
        same_names(where, "MTP tensors", mtp_found, mtp_expected)
    absent = [module for module in modules if module + WEIGHT not in base.owner]
    if absent or len(set(modules)) != len(modules):
        same_names(where, "modules to swap", set(modules) - set(absent), modules)
    return sorted(mtp_expected - mtp_found)


def make_changes(
    plan: BuildPlan,
    sources: Sources,
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


def _open_donor(
    plan: BuildPlan, base: Tree, modules: list[str], mtp_missing: list[str]
) -> Donor | None:
    if plan.donor is None or (not plan.compares_with_donor and not mtp_missing):
        if mtp_missing:
            raise GateRefused(
                str(plan.base_dir),
                f"lacks {len(mtp_missing)} MTP tensors and there is no donor to graft them from",
                "plan a donor, or use a base that has them",
            )
        return None
    planned = planned_shapes(
        plan.donor_shapes, modules, {m: base.tensor(m + WEIGHT) for m in modules}
    )
    donor = open_donor(plan.donor)
    where = plan.donor.url if isinstance(plan.donor, DonorUrl) else plan.donor.dir
    needed = [m + s for m in modules for s in (WEIGHT, SCALE)]
    if plan.compares_with_donor:
        have = donor.names.intersection(needed)
        same_names(where, "donor weights and scales", have, needed)
    same_names(
        where,
        "donor names without a partner",
        donor_unmatched(donor.names, base.owner, modules),
        expand_all(plan.donor_unmatched),
    )
    same_names(where, "MTP tensors to graft", donor.names.intersection(mtp_missing), mtp_missing)
    if mtp_missing:
        sizes = model_sizes(base, read_config(plan.base_dir))
        graftable(mtp_missing, donor, sizes, plan.block_shape)
    if plan.compares_with_donor:
        entries = donor.tensors(needed)
        for module in modules:
            weight, scale = entries[module + WEIGHT], entries[module + SCALE]
            if planned:
                donor_as_planned(module, planned[module], weight, scale)
            shape = base.tensor(module + WEIGHT).shape
            fp8_fits(f"donor {module}", shape, weight, scale, plan.block_shape)
    return donor


def _donor_tensors(plan: BuildPlan, sources: Sources) -> dict[str, Tensor]:
    """Return the donor's tensors that this plan takes or compares."""
    if sources.donor is None:
        return {}
    names = list(sources.mtp_missing)
    names += [s for s in map(scale_of, sources.mtp_missing) if s in sources.donor.names]
    if plan.compares_with_donor:
        names += [module + suffix for module in sources.modules for suffix in (WEIGHT, SCALE)]
    return sources.donor.tensors(names)


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
        layout.files.append(finished(tree_dir, name, write_json(tree_dir / name, document)))


def _report(sources: Sources, layout: Layout, taken: dict[str, Tensor]) -> dict[str, Any]:
    donor_bytes = sum(tensor.size_bytes for tensor in taken.values())
    base_bytes = sum((sources.base.directory / path).stat().st_size for path in sources.proofs)
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
