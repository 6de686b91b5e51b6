"""Write the files of a result: config.json, and shards in layout *overlay* or *full*."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_contract.orders import RECIPE_VERSION, BuildPlan
from spark_contract.receipts import ReceiptFile

from spark_checkpoint.build.write import (
    Changes,
    NewTensor,
    Written,
    aligned,
    by_alignment,
    copy_file,
    rewrite_shard,
    write_new,
)
from spark_checkpoint.errors import GateRefused
from spark_checkpoint.format.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    QUANTIZATION_NAME,
    Checkpoint,
    files_of,
)
from spark_checkpoint.progress import Progress
from spark_checkpoint.receipt import Proof, vouched
from spark_checkpoint.storage import WORKERS, stamp_of
from spark_checkpoint.tensor_sets import overlay_name

PLUGIN_METHOD = "spark_inc"
_LANGUAGE_BLOCKS = "model.language_model.layers"
_MTP_BLOCKS = "mtp.layers"
_INT8 = {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}
_PLAIN = {"bits": 16, "data_type": "float"}


def check_config(base: Mapping[str, Any], where: str, head: str) -> None:
    quantization = base.get("quantization_config")
    if not isinstance(quantization, dict):
        raise GateRefused(where, "has no quantization_config: not an INT4 base", "check the base")
    # An exporter may write null for "nothing".
    per_module = quantization.get("extra_config")
    if per_module is not None and not isinstance(per_module, dict):
        raise GateRefused(
            where,
            f"has a {type(per_module).__name__} as quantization_config.extra_config, "
            "expected an object of modules",
            "use another commit of the base, or correct its config",
        )
    if head == "int8-g128" and any(level.get("tie_word_embeddings") for level in _levels(base)):
        raise GateRefused(
            where,
            "ties the head to the embeddings, so the head cannot be packed alone",
            "plan head: keep",
        )


def result_config(
    base: Mapping[str, Any], plan: BuildPlan, names: Collection[str], modules: Sequence[str]
) -> dict[str, Any]:
    """Return config.json of a result whose tensors are ``names``; ``base`` passed `usable`.

    The method is renamed only where an engine without the plugin would read the tree wrongly;
    a tree of INT4, INT8 and 16-bit weights in full layout stays plain ``auto-round``.
    """
    config = copy.deepcopy(dict(base))
    quantization = config["quantization_config"]
    fp8 = plan.shared_experts.startswith("fp8")
    replaced = fp8 or plan.shared_experts == "int8-g128" or plan.head != "keep"
    if fp8 or (plan.layout == "overlay" and replaced):
        quantization["quant_method"] = PLUGIN_METHOD
    if fp8:
        quantization["fp8_block"] = {
            "modules": list(modules),
            "block_shape": list(plan.block_shape),
        }
    per_module = quantization["extra_config"] = quantization.get("extra_config") or {}
    if plan.shared_experts == "int8-g128":
        per_module.update({module: dict(_INT8) for module in modules})
    if plan.head == "int8-g128":
        # The engine's default is true where the key is missing.
        for level in _levels(config):
            level["tie_word_embeddings"] = False
        per_module["lm_head"] = dict(_INT8)
    set_blocks(quantization, names)
    quantization["spark"] = {
        "layout": plan.layout,
        "recipe_version": RECIPE_VERSION,
        "head": plan.head,
    }
    return merged(config, plan.extra)


def merged(config: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``extra`` into ``config``, mapping by mapping; anything else replaces."""
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), dict):
            merged(config[key], value)
        else:
            config[key] = copy.deepcopy(value)
    return config


def set_blocks(quantization: dict[str, Any], names: Collection[str]) -> None:
    """Name the blocks that hold packed weights, as the tensors say, not as the base claims.

    Without the list the engine takes every linear for quantised, MTP included; with MTP listed
    although its tensors are 16-bit (or the other way round) it refuses or misreads them.
    """
    blocks = [
        block
        for block in (_LANGUAGE_BLOCKS, _MTP_BLOCKS)
        if any(name.startswith(f"{block}.") and name.endswith(".qweight") for name in names)
    ]
    as_text = not isinstance(quantization.get("block_name_to_quantize"), list)
    quantization["block_name_to_quantize"] = ",".join(blocks) if as_text else blocks
    if _MTP_BLOCKS not in blocks:
        return
    per_module = quantization["extra_config"] = quantization.get("extra_config") or {}
    drafter = sorted(name for name in names if name.startswith(f"{_MTP_BLOCKS}."))
    packed = {name.removesuffix(".qweight") for name in drafter if name.endswith(".qweight")}
    for name in drafter:
        module = name.removesuffix(".weight")
        if module != name and module not in packed and not module.endswith("norm"):
            per_module.setdefault(module, dict(_PLAIN))


def _levels(config: Mapping[str, Any]) -> list[Any]:
    return [level for level in (config, config.get("text_config")) if isinstance(level, dict)]


OVERLAY_SHARD = "model-spark-overlay.safetensors"
GRAFT_SHARD = "model-spark-mtp.safetensors"
_REWRITTEN = frozenset({CONFIG_NAME, INDEX_NAME, QUANTIZATION_NAME})
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Written files and the shard of each tensor, before index, config and receipt."""

    files: list[ReceiptFile]
    index: dict[str, str]


@dataclass(frozen=True, slots=True)
class Writer:
    tree_dir: Path
    base: Checkpoint
    proofs: Mapping[str, Proof]  # of the base's files
    changes: Changes
    progress: Progress

    def overlay(self) -> Layout:
        """Hard-link every base file and add one shard of new tensors, named as such."""
        base, added = self.base, self.changes.added
        files = []
        for name in files_of(base.directory):
            if name not in _REWRITTEN:
                source = base.directory / name
                _link(source, self.tree_dir / name)
                sha256 = self.proofs[name].sha256
                files.append(finished_file(self.tree_dir, name, sha256, link_of=str(source)))
        new: list[NewTensor] = []
        for old, tensors in added.items():
            new += [t._replace(name=overlay_name(t.name)) if old else t for t in tensors]
        index = {name: shard for name, shard in base.owner.items() if name not in added}
        if new:
            self.progress.phase("write", self.changes.size_bytes)
            files.append(self._write_new(OVERLAY_SHARD, new))
            index.update({tensor.name: OVERLAY_SHARD for tensor in new})
        return Layout(files, index)

    def full(self) -> Layout:
        """Rewrite every shard with each tensor once, and copy other files."""
        base = self.base
        names = sorted(base.shards, key=lambda name: -base.shards[name].data_bytes)
        left_out = base.shards.keys() | _REWRITTEN
        names += [name for name in files_of(base.directory) if name not in left_out]
        names += [GRAFT_SHARD] if self.changes.added.get("") else []
        self.progress.phase("write", result_bytes(base, self.changes))
        with ThreadPoolExecutor(WORKERS) as pool:
            entries = [entry for entry in pool.map(self._full_file, names) if entry is not None]
        files = sorted(entries, key=lambda entry: entry.path)
        return Layout(files, result_index(base, self.changes))

    def _full_file(self, name: str) -> ReceiptFile | None:
        """Write one file; None for a shard that keeps no tensor."""
        if name == GRAFT_SHARD:
            return self._write_new(name, self.changes.added[""])
        source, target = self.base.directory / name, self.tree_dir / name
        proof, shard = self.proofs[name], self.base.shards.get(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        # One shard at a time: entries of a whole large model fill memory.
        tensors = full_shard(self.base, name, self.changes) if shard else []
        if shard is None or _untouched(self.base, name, tensors):
            return _entry(name, copy_file(target, source, self.progress, proof), proof.sha256)
        if not tensors:
            return None
        if not aligned(tensors):
            tensors = by_alignment(tensors)
        written = rewrite_shard(target, tensors, shard.metadata, self.progress, source, proof)
        return _entry(name, written)

    def _write_new(self, name: str, tensors: list[NewTensor]) -> ReceiptFile:
        in_order = by_alignment(tensors)
        return _entry(name, write_new(self.tree_dir / name, in_order, _METADATA, self.progress))


def result_index(base: Checkpoint, changes: Changes) -> dict[str, str]:
    index = {name: shard for name, shard in base.owner.items() if name not in changes.added}
    for old, tensors in changes.added.items():
        shard = base.owner[old] if old else GRAFT_SHARD
        index.update({tensor.name: shard for tensor in tensors})
    return index


def result_bytes(base: Checkpoint, changes: Changes) -> int:
    """Return the bytes of all tensors of a result, each counted once."""
    kept = sum(base.tensor(name).size_bytes for name in base.owner if name not in changes.added)
    return kept + changes.size_bytes


def full_shard(base: Checkpoint, shard: str, changes: Changes) -> list[NewTensor]:
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


def _untouched(base: Checkpoint, shard: str, tensors: list[NewTensor]) -> bool:
    return [tensor.name for tensor in tensors] == list(base.shards[shard].tensors) and all(
        tensor.span.path == base.directory / shard for tensor in tensors
    )


def _entry(name: str, written: Written, sha256: str | None = None) -> ReceiptFile:
    """Return a receipt entry; a rewritten file has only piece hashes."""
    pieces = tuple(map(str, written.pieces)) if sha256 is None else None
    return vouched(name, written.stamp, sha256, pieces)


def finished_file(
    tree_dir: Path, name: str, sha256: str | None, *, link_of: str | None = None
) -> ReceiptFile:
    return vouched(name, stamp_of(tree_dir / name), sha256, link_of=link_of)


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
