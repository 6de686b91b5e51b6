"""The two shapes of a result: *overlay* links the base, *full* rewrites its shards."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from spark_contract.receipts import ReceiptFile

from spark_checkpoint.build.staging import Changes, NewTensor
from spark_checkpoint.build.write import (
    Written,
    aligned,
    by_alignment,
    copy_file,
    rewrite_shard,
    write_new,
)
from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.pieces import Proof
from spark_checkpoint.format.tree import CONFIG_NAME, INDEX_NAME, QUANTIZATION_NAME, Tree, files_of
from spark_checkpoint.progress import Progress
from spark_checkpoint.storage import WORKERS, stamp_of
from spark_checkpoint.verify.expected import overlay_name

OVERLAY_SHARD = "model-spark-overlay.safetensors"
GRAFT_SHARD = "model-spark-mtp.safetensors"
_REWRITTEN = frozenset({CONFIG_NAME, INDEX_NAME, QUANTIZATION_NAME})
_METADATA = {"format": "pt"}


@dataclass(slots=True)
class Layout:
    """A written tree before index, config and receipt: its files and where each name is."""

    files: list[ReceiptFile] = field(default_factory=list)
    index: dict[str, str] = field(default_factory=dict)


def write_overlay(
    tree_dir: Path,
    base: Tree,
    proofs: Mapping[str, Proof],
    changes: Changes,
    progress: Progress,
) -> Layout:
    """Hard-link every base file and add one shard with the new tensors under their own names."""
    layout = Layout()
    for name in files_of(base.directory):
        if name in _REWRITTEN:
            continue
        _link(base.directory / name, tree_dir / name)
        sha256, link_of = proofs[name].sha256, str(base.directory / name)
        layout.files.append(finished(tree_dir, name, sha256, link_of=link_of))
    new: list[NewTensor] = []
    for old, tensors in changes.added.items():
        new += [t._replace(name=overlay_name(t.name)) if old else t for t in tensors]
    layout.index = {name: shard for name, shard in base.owner.items() if name not in changes.added}
    if new:
        progress.phase("write", changes.size_bytes)
        written = write_new(tree_dir / OVERLAY_SHARD, by_alignment(new), _METADATA, progress)
        layout.files.append(_entry(OVERLAY_SHARD, written))
        layout.index.update({tensor.name: OVERLAY_SHARD for tensor in new})
    return layout


def write_full(
    tree_dir: Path,
    base: Tree,
    proofs: Mapping[str, Proof],
    changes: Changes,
    progress: Progress,
) -> Layout:
    """Write every shard anew, each tensor once, and copy everything else."""
    layout = Layout()
    shards = base.shards
    others = [n for n in files_of(base.directory) if n not in shards and n not in _REWRITTEN]
    grafts = by_alignment(changes.added.get("", ()))
    layout.index = result_index(base, changes)
    progress.phase("write", result_bytes(base, changes))

    def one(name: str) -> ReceiptFile | None:
        target = tree_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name == GRAFT_SHARD:
            return _entry(name, write_new(target, grafts, _METADATA, progress))
        source, proof = base.directory / name, proofs[name]
        # Made here, shard by shard: those of a large model's whole tree fill memory.
        tensors = full_shard(base, name, changes) if name in shards else []
        if name not in shards or _untouched(base, name, tensors):
            return _entry(name, copy_file(target, source, progress, proof), proof.sha256)
        if not tensors:
            return None
        if not aligned(tensors):
            tensors = by_alignment(tensors)
        metadata = base.shards[name].metadata
        return _entry(name, rewrite_shard(target, tensors, metadata, progress, source, proof))

    names = sorted(shards, key=lambda name: -base.shards[name].data_bytes)
    names += [*others, *([GRAFT_SHARD] if grafts else [])]
    with ThreadPoolExecutor(WORKERS) as pool:
        entries = [entry for entry in pool.map(one, names) if entry is not None]
    layout.files = sorted(entries, key=lambda entry: entry.path)
    return layout


def result_index(base: Tree, changes: Changes) -> dict[str, str]:
    """Return which file of a *full* result holds each name."""
    index = {name: shard for name, shard in base.owner.items() if name not in changes.added}
    for old, tensors in changes.added.items():
        shard = base.owner[old] if old else GRAFT_SHARD
        index.update({tensor.name: shard for tensor in tensors})
    return index


def result_bytes(base: Tree, changes: Changes) -> int:
    """Return the bytes of all tensors of a result, each counted once."""
    kept = sum(base.tensor(name).size_bytes for name in base.owner if name not in changes.added)
    return kept + changes.size_bytes


def full_shard(base: Tree, shard: str, changes: Changes) -> list[NewTensor]:
    """Return the tensors of a rewritten shard: base order, replacements in place.

    Scales and zero points go to the end, because their odd sizes would push what follows
    off its alignment.
    """
    kept: list[NewTensor] = []
    tail: list[NewTensor] = []
    for name, tensor in base.shards[shard].tensors.items():
        if base.owner[name] != shard:
            continue
        if name in changes.added:
            first, *rest = changes.added[name]
            kept.append(first)
            tail += rest
        else:
            kept.append(NewTensor(name, tensor.dtype, tensor.shape, base.span(name, shard)))
    return kept + by_alignment(tail)


def _untouched(base: Tree, shard: str, tensors: list[NewTensor]) -> bool:
    return [tensor.name for tensor in tensors] == list(base.shards[shard].tensors) and all(
        tensor.span.path == base.directory / shard for tensor in tensors
    )


def _entry(name: str, written: Written, sha256: str | None = None) -> ReceiptFile:
    """Return a file of the receipt; a rewritten one is named by its pieces alone."""
    pieces = tuple(map(str, written.pieces)) if sha256 is None else None
    return ReceiptFile(name, written.size_bytes, sha256, written.modified_ns, pieces)


def finished(
    tree_dir: Path, name: str, sha256: str | None, *, link_of: str | None = None
) -> ReceiptFile:
    """Return a file of the receipt, which is there and will not change."""
    stamp = stamp_of(tree_dir / name)
    return ReceiptFile(name, stamp.size_bytes, sha256, stamp.modified_ns, link_of=link_of)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # A base file may itself be a link (hub cache): link what it points to.
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise GateRefused(
            str(source),
            "is on another filesystem than the result, so it cannot be hard-linked",
            "keep sources and models on one filesystem, or set layout to full",
        ) from error
