"""Quantises a checkpoint: fetch, gates, AutoRound in a container, gates again, receipt, rename."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spark_contract.files import now, sync
from spark_contract.work.orders import RequantizePlan
from spark_contract.work.receipts import ReceiptFile, RequantizedReceipt
from spark_contract.work.sharing import CopyPlan

from spark_checkpoint import TOOL_VERSION
from spark_checkpoint.build.config import set_blocks
from spark_checkpoint.build.copied import copied
from spark_checkpoint.format.tree import (
    CONFIG_NAME,
    INDEX_NAME,
    QUANTIZATION_NAME,
    files_of,
    read_json,
    read_tree,
)
from spark_checkpoint.progress import Progress
from spark_checkpoint.receipt import vouched, write_receipt
from spark_checkpoint.requantize.container import DONE, KEPT, quantise
from spark_checkpoint.requantize.fused import check_kept_experts
from spark_checkpoint.requantize.gates import check_original, check_result
from spark_checkpoint.requantize.packable import check_packable
from spark_checkpoint.sources.fetch import fetch
from spark_checkpoint.storage import WORKERS, clear, hash_file, stamp_of, write_json
from spark_checkpoint.verify.expected import exact_names
from spark_checkpoint.verify.making import make_tree


def requantize(plan: RequantizePlan, progress: Progress, copies: CopyPlan | None = None) -> bool:
    """Quantise the plan's tree, or copy it from a peer; return False when it was already there."""

    def write(work: Path, tree_dir: Path) -> None:
        if copies is not None and copied(copies, plan, tree_dir, progress):
            return
        _write_tree(plan, work, tree_dir, progress)

    return make_tree(plan, f"plan {plan.digest[:12]}", progress, write)


def _write_tree(plan: RequantizePlan, work: Path, tree_dir: Path, progress: Progress) -> None:
    fetch(plan.original, progress)
    progress.phase("gates")
    original = read_tree(plan.original.out_dir)
    check_original(original)
    check_packable(plan, original)
    clear(work, keep=KEPT)
    made = quantise(plan, work, progress)
    tree_dir.mkdir()
    for name in files_of(made):
        # Links: a result that is refused is there to be looked at, and costs nothing twice.
        target = tree_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(made / name, target)
    result = read_tree(tree_dir)
    exact_names(str(tree_dir), result.owner.keys(), plan)
    _have_index(tree_dir, result.owner)
    _say_blocks(tree_dir, result.owner)
    report = {**read_json(work / DONE), **check_result(plan, original, result)}
    report["kept_tensors"] += check_kept_experts(original, result)
    receipt = RequantizedReceipt(
        kind="requantized",
        digest=plan.digest,
        files=tuple(_hashed(tree_dir, progress)),
        tool_version=TOOL_VERSION,
        written_at=now(),
        plan=plan,
        tensors=len(result.owner),
        report=report,
    )
    write_receipt(tree_dir, receipt)


def _have_index(tree_dir: Path, owner: dict[str, str]) -> None:
    """Write an index where AutoRound made a single file and none."""
    if (tree_dir / INDEX_NAME).exists():
        return
    total = sum((tree_dir / shard).stat().st_size for shard in set(owner.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(owner.items()))}
    write_json(tree_dir / INDEX_NAME, index)


def _say_blocks(tree_dir: Path, owner: dict[str, str]) -> None:
    """Have the configs name the blocks that are packed, as the tensors say.

    AutoRound names the drafter's when it packs them. A container that was killed right after that
    finds them done when it runs again, and writes its configs without them.
    """
    for name in (CONFIG_NAME, QUANTIZATION_NAME):
        path = tree_dir / name
        config = read_json(path) if path.exists() else {}
        quantization = config.get("quantization_config", config)
        if isinstance(quantization, dict) and "block_name_to_quantize" in quantization:
            set_blocks(quantization, owner)
            write_json(path, config)


def _hashed(tree_dir: Path, progress: Progress) -> list[ReceiptFile]:
    """Have every file on the disk, root's alone to write, and return it with its hash."""
    names = files_of(tree_dir)
    progress.phase("hash", sum((tree_dir / name).stat().st_size for name in names))

    def one(name: str) -> ReceiptFile:
        path = tree_dir / name
        path.chmod(0o644)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
        sha256 = hash_file(path, progress.add)
        return vouched(name, stamp_of(path), sha256)

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(one, names))
