"""Write config.json and the shards of a result, in the layouts *overlay* and *full*."""

import copy
import errno
import os
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spark_contract.builder_api import RECIPE_VERSION, BuildPlan, expand_all
from spark_contract.receipts import ReceiptFile

from spark_checkpoint import ValidationError, directory
from spark_checkpoint.build.write import (
    GRAFTED,
    Changes,
    NewTensor,
    Written,
    copy_file,
    is_aligned,
    rewrite_shard,
    sort_by_alignment,
    write_new,
)
from spark_checkpoint.progress import Progress
from spark_checkpoint.storage import WORKERS, FileHashes, read_stamp
from spark_checkpoint.tensor_sets import MTP_PREFIX, OVERLAY_SHARD, overlay_name
from spark_checkpoint.verify import receipt_entry

PLUGIN_METHOD = "spark_inc"
GRAFT_SHARD = "model-spark-mtp.safetensors"
_LANGUAGE_BLOCKS = "model.language_model.layers"
_MTP_BLOCKS = "mtp.layers"
_INT8 = {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}
_SIXTEEN_BITS = {"bits": 16, "data_type": "float"}
# The engine treats keys of extra_config with such a character as regular expressions.
_PATTERN_CHARACTERS = frozenset(r"*+?^$()[]{}|\\")
_REWRITTEN = frozenset({directory.CONFIG_NAME, directory.INDEX_NAME, directory.QUANTIZATION_NAME})
_METADATA = {"format": "pt"}


# Regular expressions of the values that the plugin accepts (settings.py).
_PLUGIN_VALUES = {
    "sym": "True",
    "data_type": "int",
    "bits": "4|8",
    "packing_format": ".*gptq.*",
}


def _needs_plugin(plan: BuildPlan) -> bool:
    """Return whether an engine without the plugin would misread the result."""
    has_int8 = plan.shared_experts == "int8-g128" or plan.head != "keep"
    # An n-gram table moves from the tensors to its own file, which only the plugin reads.
    has_table_file = plan.ngram_table != "keep"
    is_overlay = plan.layout == "overlay"
    return plan.shared_experts.startswith("fp8") or (is_overlay and has_int8) or has_table_file


def check_config(base: Mapping[str, Any], where: str, plan: BuildPlan) -> None:
    quantization = base.get("quantization_config")
    if not isinstance(quantization, dict):
        raise ValidationError(where, "has no quantization_config", "use an INT4 base")
    if "quant_method" not in quantization:
        problem = "has no quant_method in quantization_config"
        raise ValidationError(where, problem, "use an INT4 base")
    for key, pattern in _PLUGIN_VALUES.items() if _needs_plugin(plan) else ():
        if key in quantization and not re.fullmatch(pattern, str(quantization[key])):
            problem = f"quantization_config.{key} is {quantization[key]!r}, expected {pattern}"
            raise ValidationError(where, problem, "use another INT4 base")
    per_module = quantization.get("extra_config")  # some exporters write null
    if per_module is not None and not isinstance(per_module, dict):
        problem = (
            "quantization_config.extra_config must be an object with a key per module, "
            f"but is a {type(per_module).__name__}"
        )
        raise ValidationError(where, problem, "use another commit of the base, or fix config.json")
    for name, entry in (per_module or {}).items():
        if module := _sixteen_bit_match(name, entry, plan.drafter_int4):
            problem = f"quantization_config.extra_config.{name} keeps {module} in 16 bits"
            fix = "set engine.drafter: keep, or use a base that lists its modules by name"
            raise ValidationError(where, problem, fix)
    is_tied = any(section.get("tie_word_embeddings") for section in _config_sections(base))
    if plan.head == "int8-g128" and is_tied:
        problem = "has tied embeddings, so the head cannot be packed separately"
        raise ValidationError(where, problem, "set head: keep")


def _sixteen_bit_match(pattern: str, entry: Any, modules: Sequence[str]) -> str | None:
    """Return the first module that a regular expression of extra_config keeps in 16 bits."""
    bits = entry.get("bits", 4) if isinstance(entry, dict) else entry
    if bits not in (16, 32) or not _PATTERN_CHARACTERS & set(pattern):
        return None
    with suppress(re.error):
        return next(
            (name for name in sorted(expand_all(modules)) if re.search(pattern, name)), None
        )
    return None


def result_config(
    base: Mapping[str, Any], plan: BuildPlan, names: Collection[str], modules: Sequence[str]
) -> dict[str, Any]:
    """Return the config.json of a result with these tensor names.

    ``quant_method`` changes only if an engine without the plugin would misread the checkpoint.
    INT4, INT8 and 16-bit weights in layout *full* keep ``auto-round``.
    """
    config = copy.deepcopy(dict(base))
    quantization = config["quantization_config"]
    has_fp8 = plan.shared_experts.startswith("fp8")
    if _needs_plugin(plan):
        quantization["quant_method"] = PLUGIN_METHOD
    if quantization["quant_method"] == PLUGIN_METHOD:
        fp8_modules = list(modules) if has_fp8 else []
        quantization["fp8_block"] = {"modules": fp8_modules, "block_shape": list(plan.block_shape)}
    per_module = quantization["extra_config"] = quantization.get("extra_config") or {}
    if plan.shared_experts == "int8-g128":
        per_module.update({module: dict(_INT8) for module in modules})
    if plan.head == "int8-g128":
        # Set explicitly, because the engine's default is true.
        for section in _config_sections(config):
            section["tie_word_embeddings"] = False
        per_module["lm_head"] = dict(_INT8)
    set_blocks(quantization, names)
    quantization["spark"] = {
        "layout": plan.layout,
        "recipe_version": RECIPE_VERSION,
        "head": plan.head,
    }
    return _merge(config, plan.extra)


def _merge(config: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), dict):
            _merge(config[key], value)
        else:
            config[key] = copy.deepcopy(value)
    return config


def set_blocks(quantization: dict[str, Any], names: Collection[str]) -> None:
    """Set ``block_name_to_quantize`` to the blocks with packed weights.

    Without it, the engine would treat all linear modules as quantized, including those of MTP.
    """
    blocks = [
        block
        for block in (_LANGUAGE_BLOCKS, _MTP_BLOCKS)
        if any(name.startswith(f"{block}.") and name.endswith(".qweight") for name in names)
    ]
    is_list = isinstance(quantization.get("block_name_to_quantize"), list)
    quantization["block_name_to_quantize"] = blocks if is_list else ",".join(blocks)
    if _MTP_BLOCKS not in blocks:
        return
    per_module = quantization["extra_config"] = quantization.get("extra_config") or {}
    drafter = sorted(name for name in names if name.startswith(f"{_MTP_BLOCKS}."))
    packed = {name.removesuffix(".qweight") for name in drafter if name.endswith(".qweight")}
    for name in packed:
        per_module.pop(name, None)  # the base lists it with 16 bits
    for name in drafter:
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module not in packed and not module.endswith("norm"):
            per_module.setdefault(module, dict(_SIXTEEN_BITS))


def _config_sections(config: Mapping[str, Any]) -> list[Any]:
    """Return the config and its section for the language model, if any."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


@dataclass(frozen=True, slots=True)
class Layout:
    files: list[ReceiptFile]
    index: dict[str, str]  # tensor -> shard


@dataclass(frozen=True, slots=True)
class Writer:
    result_dir: Path
    base: directory.Checkpoint
    hashes: Mapping[str, FileHashes]  # of the base's files
    changes: Changes
    progress: Progress

    def write_overlay(self, rewritten: Collection[str]) -> Layout:
        """Hard-link the base's files; write new tensors to one more shard, under overlay names.

        The ``rewritten`` shards are copied instead, without removed tensors and with the packed
        drafter, if any.
        """
        base, added = self.base, self.changes.added
        in_place = {old: new for old, new in added.items() if old.startswith(MTP_PREFIX) or not new}
        index = {name: shard for name, shard in base.owner.items() if name not in added}
        copied = sum(base.tensor(name).size_bytes for name in index if index[name] in rewritten)
        self.progress.start_phase("write", self.changes.size_bytes + copied)
        rewriter = replace(self, changes=Changes(in_place))
        files = []
        for name in directory.list_files(base.directory):
            if name in rewritten:
                if entry := rewriter._write_full_layout_file(name):
                    files.append(entry)
            elif name not in _REWRITTEN:
                source, target = base.directory / name, self.result_dir / name
                _link_file(source, target)
                stamp, sha256 = read_stamp(target), self.hashes[name].sha256
                files.append(receipt_entry(name, stamp, sha256, link_target=str(source)))
        in_overlay: list[NewTensor] = []
        for old, tensors in added.items():
            if old in in_place:
                index.update({tensor.name: base.owner[old] for tensor in tensors})
            elif old != GRAFTED:
                in_overlay += [new._replace(name=overlay_name(new.name)) for new in tensors]
            else:
                in_overlay += tensors
        if in_overlay:
            files.append(self._write_new_shard(OVERLAY_SHARD, in_overlay))
            index.update({tensor.name: OVERLAY_SHARD for tensor in in_overlay})
        return Layout(files, index)

    def write_full(self) -> Layout:
        """Rewrite the shards without duplicate tensors; copy the other files."""
        base, added = self.base, self.changes.added
        names = sorted(base.shards, key=lambda name: -base.shards[name].data_bytes)
        excluded = base.shards.keys() | _REWRITTEN
        names += [name for name in directory.list_files(base.directory) if name not in excluded]
        names += [GRAFT_SHARD] if added.get(GRAFTED) else []
        self.progress.start_phase("write", result_bytes(base, self.changes))
        with ThreadPoolExecutor(WORKERS) as pool:
            entries = [entry for entry in pool.map(self._write_full_layout_file, names) if entry]
        index = {name: shard for name, shard in base.owner.items() if name not in added}
        for old, tensors in added.items():
            shard = GRAFT_SHARD if old == GRAFTED else base.owner[old]
            index.update({tensor.name: shard for tensor in tensors})
        return Layout(sorted(entries, key=lambda entry: entry.path), index)

    def _write_full_layout_file(self, name: str) -> ReceiptFile | None:
        """Write a file; if no tensor remains in a shard, skip the shard and return None."""
        if name == GRAFT_SHARD:
            return self._write_new_shard(name, self.changes.added[GRAFTED])
        source, target = self.base.directory / name, self.result_dir / name
        hashes, shard = self.hashes[name], self.base.shards.get(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        # List one shard at a time, because the tensors of a large model take much memory.
        tensors = _list_full_shard(self.base, name, self.changes) if shard else []
        has_new = any(tensor.span.path != source for tensor in tensors)
        names = [tensor.name for tensor in tensors]
        if shard is None or (names == list(shard.tensors) and not has_new):
            return make_entry(name, copy_file(target, source, self.progress, hashes), hashes.sha256)
        if not tensors:
            return None
        if not is_aligned(tensors):
            tensors = sort_by_alignment(tensors)
        written = rewrite_shard(target, tensors, shard.metadata, self.progress, source, hashes)
        return make_entry(name, written)

    def _write_new_shard(self, name: str, tensors: list[NewTensor]) -> ReceiptFile:
        tensors = sort_by_alignment(tensors)
        written = write_new(self.result_dir / name, tensors, _METADATA, self.progress)
        return make_entry(name, written)


def result_bytes(base: directory.Checkpoint, changes: Changes) -> int:
    kept = sum(base.tensor(name).size_bytes for name in base.owner if name not in changes.added)
    return kept + changes.size_bytes


def _list_full_shard(base: directory.Checkpoint, shard: str, changes: Changes) -> list[NewTensor]:
    """Return the tensors of a rewritten shard in the base's order.

    Scales and zero points come last, because their odd sizes would misalign the next tensors.
    """
    weights: list[NewTensor] = []
    scales: list[NewTensor] = []
    for name, tensor in base.shards[shard].tensors.items():
        if base.owner[name] != shard:
            continue
        if name in changes.added:
            new = changes.added[name]  # the weight, then its scales; empty if it is removed
            weights += new[:1]
            scales += new[1:]
        else:
            weights.append(NewTensor(name, tensor.dtype, tensor.shape, base.span(name, shard)))
    return weights + sort_by_alignment(scales)


def make_entry(name: str, written: Written, sha256: str | None = None) -> ReceiptFile:
    """Return the receipt entry of a file; a rewritten file has pieces instead of a sha256."""
    pieces = tuple(map(str, written.pieces)) if sha256 is None else None
    return receipt_entry(name, written.stamp, sha256, pieces)


def _link_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # A base file may be a symbolic link, as in a hub cache.
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        problem = "is not on the same filesystem as the result, so it cannot be hard-linked"
        fix = "keep sources and models on the same filesystem, or set layout to full"
        raise ValidationError(str(source), problem, fix) from error
