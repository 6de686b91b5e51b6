"""Describe a checkpoint, compare it with a plan, and remove a base that is no longer needed."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark_contract.files import sync_directory
from spark_contract.orders import BuildPlan, Described, Held, count, expand, expand_all
from spark_contract.paths import RECEIPT_NAME
from spark_contract.receipts import CheckpointReceipt, Receipt

from spark_checkpoint.build.layouts import check_config
from spark_checkpoint.build.source_checks import check_sources, donor_tensors
from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.directory import CONFIG_NAME, checkpoint_from_headers, natural_order
from spark_checkpoint.inspect.anatomy import examine
from spark_checkpoint.inspect.inspection import Subject, match_plan_names
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.receipt import load_receipt
from spark_checkpoint.tensor_sets import (
    SCALE,
    WEIGHT,
    base_patterns,
    check_donor_shapes,
    check_fp8_pair,
    check_same_names,
    swapped_modules,
    unmatched_donor_names,
)
from spark_checkpoint.verify import verify_checkpoint

# The first match in a tensor name decides its part of the model.
_PARTS = {
    "drafter": re.compile(r"(^|\.)mtp(_block)?\."),
    "vision": re.compile(
        r"(^|\.)(visual|vision_\w+|vit|audio_\w+|multi_modal_projector|mm_projector|"
        r"embed_vision|embed_audio|patch_merg\w+|image_newline|mlp1)(\.|$)"
    ),
}
_LAYER = re.compile(r"(^|\.)layers\.(\d{1,6})\.")


def describe(subject: Subject) -> Described:
    """Return what headers and documents state; an index limits the files that count."""
    loaded = set(subject.index.values()) if subject.index else set(subject.shards)
    if gone := sorted(loaded - subject.shards.keys()):
        what = f"its index names {len(gone)} files that it does not hold, {gone[0][:60]!r} first"
        raise GateRefused(subject.place, what, "name another commit: no engine could load this one")
    shards = {name: header for name, header in subject.shards.items() if name in loaded}
    found = examine(shards, None)
    own_drafter = _first_drafter_layer(subject.config)
    parts: dict[str, Counter[str]] = {part: Counter() for part in ("text", *_PARTS)}
    for name, tensor in found.names.items():
        parts[_part(name, own_drafter)][tensor.dtype] += tensor.size_bytes
    return Described(
        commit=subject.place.rpartition("@")[2],
        parts={part: dict(sorted(sizes.items())) for part, sizes in parts.items()},
        tensors=len(found.names),
        repeats_names=bool(found.duplicates),
        files=dict(sorted(subject.files.items())),
        documents={path: dict(said) for path, said in subject.documents.items()},
    )


def _part(name: str, own_drafter: int | None) -> str:
    layer = _LAYER.search(name)
    if own_drafter is not None and layer and int(layer[2]) >= own_drafter:
        return "drafter"
    return next((part for part, said in _PARTS.items() if said.search(name)), "text")


def _first_drafter_layer(config: Mapping[str, Any]) -> int | None:
    """Return the first drafter layer of models that append it, such as DeepSeek and GLM."""
    text = config.get("text_config")
    numbers = {**config, **(text if isinstance(text, dict) else {})}
    layers, drafts = (numbers.get(k) for k in ("num_hidden_layers", "num_nextn_predict_layers"))
    counted = type(layers) is int and type(drafts) is int and drafts > 0
    return layers if counted else None


def check_base(subject: Subject, plan: BuildPlan) -> Held:
    """Run a build's checks of base and donor on headers, before any download."""
    check_config(subject.config, f"{subject.place}: {CONFIG_NAME}", plan.head)
    shards = {name: subject.shards[name] for name in sorted(subject.shards, key=natural_order)}
    base = checkpoint_from_headers(Path(subject.place), shards, subject.index)
    gated = check_sources(plan, base, subject.config)
    donor = gated.donor
    if donor is not None:
        donor_tensors(plan, gated)  # reads and checks their headers
    return Held(
        base_tensors=len(base.owner),
        donor_tensors=len(donor.names) if donor else 0,
        swapped_modules=len(gated.modules),
        mtp_tensors=sum(map(count, plan.mtp_tensors)),
        mtp_from_donor=len(gated.mtp_missing),
    )


_PARTS_fits = {"keep": "base", "fp8-base": "hybrid", "fp8-donor": "donor"}


def fits(subject: Subject, plan: BuildPlan) -> dict[str, Any]:
    part = _PARTS_fits.get(plan.shared_experts, plan.shared_experts)
    try:
        said = _as_donor(subject, plan) if part == "donor" else match_plan_names(subject, plan)
    except GateRefused as error:
        return {"plan": plan.name, "part": part, "fits": False, "why": error.what}
    return {"plan": plan.name, "part": part, "fits": True, "why": said}


def _as_donor(subject: Subject, plan: BuildPlan) -> str:
    """Compare a subject with a plan's donor; the base is taken from the plan."""
    tensors = {
        name: tensor
        for header in subject.shards.values()
        for name, tensor in header.tensors.items()
    }
    modules = swapped_modules(plan)
    needed = [module + suffix for module in modules for suffix in (WEIGHT, SCALE)]
    check_same_names(
        subject.place, "donor weights and scales", tensors.keys() & set(needed), needed
    )
    base = expand_all([*base_patterns(plan), *plan.mtp_tensors])
    check_same_names(
        subject.place,
        "donor names without a partner",
        unmatched_donor_names(tensors, base, modules),
        expand_all(plan.donor_unmatched),
    )
    for part in plan.donor_shapes:
        for module in expand(part.modules):
            weight, scale = tensors[module + WEIGHT], tensors[module + SCALE]
            check_donor_shapes(module, part, weight, scale)
            check_fp8_pair(f"donor {module}", part.weight, weight, scale, plan.block_shape)
    return f"the plan's donor of {len(modules)} modules"


def discard(base: Path, tree: Path, progress: Progress) -> bool:
    """Remove ``base`` after verifying every byte of ``tree``; return False if already gone."""
    if not base.exists():
        note(f"{base}: was removed before")
        return False
    receipt = verify_checkpoint(tree, progress, full=True)
    report = _standing_alone(tree, base, receipt).report
    if load_receipt(base) is None and any(base.iterdir()):
        raise GateRefused(
            str(base), "has no receipt, so it is not ours to remove", "remove it by hand"
        )
    freed, shared = _remove(base)
    left = f"; {shared} bytes stay, other directories link them" if shared else ""
    again = sum(report.get("rebuild_fetch_bytes", {}).values())
    note(f"{base}: removed, {freed} bytes freed{left}; a rebuild of {tree} fetches {again} bytes")
    return True


def _standing_alone(tree: Path, base: Path, receipt: Receipt) -> CheckpointReceipt:
    if not isinstance(receipt, CheckpointReceipt) or receipt.plan.layout != "full":
        raise GateRefused(str(tree), "is no checkpoint in layout full", "keep its base")
    made_from = receipt.plan.base_dir
    if made_from != Path(os.path.abspath(base)):
        raise GateRefused(str(tree), f"was made from {made_from}, not from {base}", "name its base")
    return receipt


def _remove(base: Path) -> tuple[int, int]:
    """Remove a directory; return freed bytes, and bytes that other hard links keep.

    The receipt goes last: it marks the directory as managed, and without its files it is invalid.
    """
    freed = shared = 0
    receipt = base / RECEIPT_NAME
    for path in sorted(base.rglob("*"), key=lambda path: (path == receipt, -len(path.parts))):
        if path.is_dir() and not path.is_symlink():
            os.rmdir(path)
            continue
        status = path.lstat()
        if status.st_nlink == 1:
            freed += status.st_size
        else:
            shared += status.st_size
        if path == receipt:
            sync_directory(base)
        os.unlink(path)
    os.rmdir(base)
    sync_directory(base.parent)
    return freed, shared
