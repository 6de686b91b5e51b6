"""Describe a checkpoint directory or repository, from headers."""

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_contract.builder_api import RepositoryDescription
from spark_contract.fetching import TransferOptions
from spark_contract.receipts import SourceReceipt
from spark_contract.units import COMMIT

from spark_checkpoint import InputError, ValidationError
from spark_checkpoint.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    list_files,
    natural_sort_key,
    parse_object,
    read_index,
    read_json,
)
from spark_checkpoint.headers import Header, Tensor, read_header
from spark_checkpoint.sources.donor import RepositoryFiles
from spark_checkpoint.tensor_sets import (
    FP8,
    MTP_PREFIX,
    OVERLAY_SHARD,
    SCALE,
    scale_name,
    summarize_names,
)
from spark_checkpoint.verify import load_receipt

DEFAULT_ENDPOINT = "https://huggingface.co"
_REPOSITORY = re.compile(r"([A-Za-z0-9._-]+/[A-Za-z0-9._-]+)(?:@([A-Za-z0-9._-]+))?")
_LISTING_BYTES = 64 << 20
_DOCUMENT_BYTES = 8 << 20  # several times the largest known document
_SHARD_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class InspectedCheckpoint:
    source: str
    shards: Mapping[str, Header]
    index: Mapping[str, str] | None
    config: Mapping[str, Any]
    receipt: str
    files: Mapping[str, int | None]  # sizes as the hub reports them
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def open_checkpoint(
    source: str,
    endpoint: str | None,
    transfer: TransferOptions,
    leave_out: Sequence[str],
    documents: Sequence[str],
) -> InspectedCheckpoint:
    """Read the headers of a directory or of a repository ``org/name[@revision]``.

    ``leave_out`` are shell patterns of files to ignore; ``documents`` are JSON files to read.
    """
    directory = Path(source)
    if directory.is_dir():
        return _open_directory(directory)
    match = _REPOSITORY.fullmatch(source)
    if not match or source.startswith("/"):
        problem = "is neither an existing directory nor org/name[@revision]"
        raise InputError(source, problem, "check the spelling")
    name, revision = match[1], match[2] or "main"
    hub = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    files = RepositoryFiles(f"{hub}/{name}/resolve/{revision}/", transfer)

    def read_object(url: str, limit_bytes: int) -> dict[str, Any]:
        return parse_object(files.client.read_whole(url, limit_bytes), url, "check the repository")

    listing = read_object(f"{hub}/api/models/{name}/revision/{revision}?blobs=true", _LISTING_BYTES)
    commit = str(listing.get("sha"))
    if not re.fullmatch(COMMIT, commit):
        problem = f"has an invalid commit in the hub's response: {commit[:60]!r}"
        raise ValidationError(name, problem, "set the endpoint to a Hugging Face hub")
    # Read by commit, because a push during the inspection would mix two revisions.
    files = RepositoryFiles(f"{hub}/{name}/resolve/{commit}/", transfer)
    present = {
        path: size
        for path, size in _parse_listing(listing, name).items()
        if not any(fnmatch.fnmatchcase(path, pattern) for pattern in leave_out)
    }
    shards = [path for path in present if path.endswith(".safetensors") and "/" not in path]
    if not 0 < len(shards) <= _SHARD_LIMIT:
        fix = "check the repository"
        raise ValidationError(name, f"lists {len(shards)} .safetensors files", fix)
    with ThreadPoolExecutor(transfer.parallel) as pool:
        headers = dict(zip(shards, pool.map(files.header, shards), strict=True))
    index = files.index() if INDEX_NAME in present else None
    contents = {
        path: read_object(files.url(path), _DOCUMENT_BYTES) for path in documents if path in present
    }
    return InspectedCheckpoint(
        source=f"{name}@{commit}",
        shards=headers,
        index=index,
        config=contents.get(CONFIG_NAME, {}),
        receipt=f"none (read {files.client.received_bytes} bytes of headers)",
        files=present,
        documents=contents,
    )


def _open_directory(directory: Path) -> InspectedCheckpoint:
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        fix = "pass the directory of a model"
        raise ValidationError(str(directory), "contains no .safetensors file", fix)
    config = directory / CONFIG_NAME
    summary = "none"
    receipt = load_receipt(directory)
    if receipt is not None:
        name = receipt.name if isinstance(receipt, SourceReceipt) else receipt.plan.name
        summary = (
            f"{receipt.kind} {name}, digest {receipt.digest[:12]}, written at {receipt.written_at}"
        )
    return InspectedCheckpoint(
        source=str(directory),
        shards={path.name: read_header(path) for path in paths},
        index=read_index(directory),
        config=read_json(config) if config.exists() else {},
        receipt=summary,
        files={name: (directory / name).stat().st_size for name in list_files(directory)},
    )


def _parse_listing(listing: Mapping[str, Any], name: str) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {}
    siblings = listing.get("siblings")
    for item in siblings if isinstance(siblings, list) else ():
        if isinstance(item, dict) and isinstance(item.get("rfilename"), str):
            size = item.get("size")
            sizes[item["rfilename"]] = size if type(size) is int else None
    if not isinstance(siblings, list) or len(sizes) != len(siblings):
        problem = "the hub's response contains no valid list of files"
        raise ValidationError(name, problem, "check the endpoint and the repository")
    return sizes


# The part of the model that a tensor belongs to; the first matching pattern decides.
_PART_PATTERNS = {
    "drafter": re.compile(r"(^|\.)mtp(_block)?\."),
    "vision": re.compile(
        r"(^|\.)(visual|vision_\w+|vit|audio_\w+|multi_modal_projector|mm_projector|"
        r"embed_vision|embed_audio|patch_merg\w+|image_newline|mlp1)(\.|$)"
    ),
}


def describe(checkpoint: InspectedCheckpoint) -> RepositoryDescription:
    """Summarize headers and documents of the files in the index."""
    loaded = set(checkpoint.index.values()) if checkpoint.index else set(checkpoint.shards)
    if missing := sorted(loaded - checkpoint.shards.keys()):
        problem = f"the index lists {len(missing)} missing files, such as {missing[0][:60]!r}"
        fix = "use another commit, because no engine can load an incomplete checkpoint"
        raise ValidationError(checkpoint.source, problem, fix)
    shards = {name: header for name, header in checkpoint.shards.items() if name in loaded}
    tensors, copies = used_tensors(shards)
    drafter_layer = _first_drafter_layer(checkpoint.config)
    parts: dict[str, Counter[str]] = {part: Counter() for part in ("text", *_PART_PATTERNS)}
    for name, tensor in tensors.items():
        parts[_model_part(name, drafter_layer)][tensor.dtype] += tensor.size_bytes
    return RepositoryDescription(
        commit=checkpoint.source.rpartition("@")[2],
        parts={part: dict(sorted(sizes.items())) for part, sizes in parts.items()},
        tensors=len(tensors),
        repeats_names=any(len(files) > 1 for files in copies.values()),
        files=dict(sorted(checkpoint.files.items())),
        documents={path: dict(content) for path, content in checkpoint.documents.items()},
    )


def _model_part(name: str, drafter_layer: int | None) -> str:
    layer = re.search(r"(^|\.)layers\.(\d{1,6})\.", name)
    if drafter_layer is not None and layer and int(layer[2]) >= drafter_layer:
        return "drafter"
    return next((part for part, pattern in _PART_PATTERNS.items() if pattern.search(name)), "text")


def _first_drafter_layer(config: Mapping[str, Any]) -> int | None:
    """Return the first layer of a drafter whose layers follow the model's, as in DeepSeek."""
    text = config.get("text_config")
    values = {**config, **(text if isinstance(text, dict) else {})}
    layer_count = values.get("num_hidden_layers")
    drafter_count = values.get("num_nextn_predict_layers")
    has_drafter = type(drafter_count) is int and drafter_count > 0
    return layer_count if type(layer_count) is int and has_drafter else None


_LAYER = re.compile(r"^model\.language_model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# The group that a tensor belongs to; the first matching pattern decides.
_GROUP_PATTERNS = {
    "MTP experts": r"^mtp\..*\.experts\.",
    "MTP other": r"^mtp\.",
    "routed experts": r"\.mlp\.experts\.",
    "shared experts": r"\.mlp\.shared_expert\.",
    "routers and gates": r"\.mlp\.(gate|shared_expert_gate)\.",
    "linear attention": r"\.linear_attn\.",
    "attention": r"^model\.language_model\..*\.self_attn\.",
    "norms": r"^model\.language_model\..*norm\.",
    "embeddings": r"\.embed_tokens\.",
    "head": r"^lm_head\.",
    "vision": r"^model\.visual\.",
}


def used_tensors(shards: Mapping[str, Header]) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return the tensors that an engine loads, and the shards of all copies of each."""
    copies: dict[str, list[str]] = {}
    for shard in sorted(shards, key=natural_sort_key):
        for name in shards[shard].tensors:
            copies.setdefault(name, []).append(shard)
    return {name: shards[files[-1]].tensors[name] for name, files in copies.items()}, copies


def group_and_dtype(name: str, tensor: Tensor) -> tuple[str, str]:
    matching = (group for group, pattern in _GROUP_PATTERNS.items() if re.search(pattern, name))
    return next(matching, "other"), tensor.dtype


def original_name(name: str) -> str:
    return name.removesuffix("_fp8").removesuffix("_int8")


def describe_recipe(
    groups_and_dtypes: Collection[tuple[str, str]], shard_names: Container[str]
) -> str:
    shared = {dtype for group, dtype in groups_and_dtypes if group == "shared experts"}
    experts = {dtype for group, dtype in groups_and_dtypes if group == "routed experts"}
    if OVERLAY_SHARD in shard_names:
        return "hybrid, overlay layout (needs the plugin)"
    if "I32" in experts and FP8 in shared:
        return "hybrid, full layout (needs the plugin)"
    if "I32" in experts and "I32" in shared:
        return "INT4 with INT8 shared experts (plain auto-round, no plugin)"
    if "I32" in experts:
        return "INT4 base"
    if FP8 in experts:
        return "FP8 donor"
    return f"{'/'.join(sorted(experts))} original" if experts else "unknown"


def find_missing_scales(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the FP8 weights without a tensor of block scales."""
    missing = []
    for name, tensor in tensors.items():
        if name.endswith(".weight_fp8"):  # a name in an overlay
            scale = name.replace(".weight_fp8", f"{SCALE}_fp8")
        else:
            scale = scale_name(name)
        if tensor.dtype == FP8 and scale not in tensors:
            missing.append(name)
    return missing


# Keys of quantization_config that describe storage.
_QUANTIZATION_KEYS = frozenset({"quant_method", "bits", "group_size", "sym", "data_type", "fmt",
                           "packing_format", "activation_scheme", "weight_block_size"})  # fmt: skip


def report(checkpoint: InspectedCheckpoint) -> dict[str, Any]:
    shards, index = checkpoint.shards, checkpoint.index
    tensors, copies = used_tensors(shards)
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for name, tensor in tensors.items():
        group = group_and_dtype(name, tensor)
        counts[group] += 1
        sizes[group] += tensor.size_bytes
    quantization = checkpoint.config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    recipe = describe_recipe(counts, shards)
    if method := quantization.get("quant_method"):
        recipe += f", quant_method {method}"
    listed = copies if index is None else index
    replaced = {original_name(name) for name in listed if name != original_name(name)}
    if "lm_head.qweight" in replaced:
        replaced.add("lm_head.weight")
    unknown = (name for name, shard in (index or {}).items() if shard not in copies.get(name, ()))
    duplicates = [name for name, files in copies.items() if len(files) > 1]
    layers = [(match[1], name) for name in tensors if (match := _LAYER.match(name))]
    norm = tensors.get("model.language_model.norm.weight")
    mtp = sum(name.startswith(MTP_PREFIX) for name in tensors)
    return {
        "source": checkpoint.source,
        "receipt": checkpoint.receipt,
        "model": checkpoint.config.get("model_type"),
        "recipe": recipe,
        "shards": len(shards),
        "tensors": len(tensors),
        "unique_bytes": sizes.total(),
        "stored_bytes": sum(header.data_bytes for header in shards.values()),
        "layers": len({layer for layer, _ in layers}),
        "linear_layers": len({layer for layer, name in layers if ".linear_attn." in name}),
        "experts": len({expert[1] for _, name in layers if (expert := _EXPERT.search(name))}),
        "hidden": norm.shape[0] if norm is not None and norm.shape else 0,
        "mtp_tensors": mtp,
        "base_tensors": len(tensors) - mtp,
        "groups": [
            {"group": group, "dtype": dtype, "tensors": count, "bytes": sizes[group, dtype]}
            for (group, dtype), count in sorted(counts.items())
        ],
        "duplicates": len(duplicates),
        "duplicate_groups": summarize_names(duplicates),
        "index": "none" if index is None else len(index),
        "unindexed": summarize_names(copies.keys() - listed.keys() - replaced),
        "unknown_to_shards": summarize_names(unknown),
        "fp8_weights_without_scales": summarize_names(find_missing_scales(tensors)),
        "block_name_to_quantize": quantization.get("block_name_to_quantize"),
        "quantization": {
            key: value
            for key, value in quantization.items()
            if key in _QUANTIZATION_KEYS and isinstance(value, str | int | float)
        },
        "files": [
            {
                "path": path,
                "bytes": size,
                "tensors": len(shards[path].tensors) if path in shards else None,
            }
            for path, size in sorted(checkpoint.files.items())
        ],
    }


def format_report(data: Mapping[str, Any]) -> str:
    quantization = ", ".join(f"{key} {value}" for key, value in data["quantization"].items())
    lines = [
        f"{data['source']}",
        f"  model      {data['model'] or 'no model_type in config.json'}",
        f"  recipe     {data['recipe']}",
        f"  quantized  {quantization or 'no quantization_config in config.json'}",
        f"  receipt    {data['receipt']}",
        f"  layers     {data['layers']} ({data['linear_layers']} linear attention), "
        f"{data['experts']} experts, hidden size {data['hidden']}",
        f"  tensors    {data['tensors']} in {data['shards']} shards: {data['base_tensors']} "
        f"+ {data['mtp_tensors']} MTP",
        f"  bytes      {data['unique_bytes']} unique, {data['stored_bytes']} stored",
        f"  index      {data['index']} names",
        "",
        f"  {'group':<20}{'dtype':<10}{'tensors':>10}{'bytes':>18}",
    ]
    lines += [
        f"  {row['group']:<20}{row['dtype']:<10}{row['tensors']:>10}{row['bytes']:>18}"
        for row in data["groups"]
    ]
    warnings = {
        "duplicate_groups": "in several shards (the engine uses the last)",
        "unindexed": "in a shard, but not in the index, so the engine may skip the file",
        "unknown_to_shards": "in the index, but not in the listed shard",
        "fp8_weights_without_scales": "FP8 weights without block scales",
    }
    problems = [f"  {text}: {data[key]}" for key, text in warnings.items() if data[key]]
    lines += ["", *problems] if problems else []
    lines += ["", f"  {'file':<50}{'tensors':>10}{'bytes':>18}"]
    for row in data["files"]:
        tensors, size = ("-" if row[key] is None else row[key] for key in ("tensors", "bytes"))
        lines.append(f"  {row['path']:<50}{tensors:>10}{size:>18}")
    if data.get("against"):
        lines += ["", f"  {'compared with':<24}{'as':<10}"]
        for row in sorted(data["against"], key=lambda row: not row["fits"]):
            verdict = "matches" if row["fits"] else "differs"
            result = f"{verdict}: {row['why'].split(' (')[0]}"
            lines.append(f"  {row['plan']:<24}{row['part']:<10}{result}")
    return "\n".join(lines)
