"""Describe the content of a checkpoint directory or repository by headers."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_contract.fetching import TransferOptions
from spark_contract.orders import RepositoryDescription
from spark_contract.receipts import SourceReceipt
from spark_contract.units import COMMIT

from spark_checkpoint.build.layouts import OVERLAY_SHARD
from spark_checkpoint.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    list_files,
    natural_sort_key,
    parse_object,
    read_index,
    read_json,
)
from spark_checkpoint.errors import InputError, ValidationError
from spark_checkpoint.headers import Header, Tensor, read_header
from spark_checkpoint.sources.donor import RepositoryFiles
from spark_checkpoint.tensor_sets import FP8, MTP_PREFIX, SCALE, summarize_names
from spark_checkpoint.verify import load_receipt

DEFAULT_ENDPOINT = "https://huggingface.co"
_REPOSITORY = re.compile(r"([A-Za-z0-9._-]+/[A-Za-z0-9._-]+)(?:@([A-Za-z0-9._-]+))?")
_LISTING_BYTES = 64 << 20
_DOCUMENT_BYTES = 8 << 20  # several times the largest known
_SHARD_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class InspectedCheckpoint:
    place: str
    shards: Mapping[str, Header]
    index: Mapping[str, str] | None
    config: Mapping[str, Any]
    receipt: str
    files: Mapping[str, int | None]  # sizes as the hub reports them
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def open_checkpoint(
    place: str,
    endpoint: str | None,
    transfer: TransferOptions,
    *,
    leave_out: Sequence[str] = (),
    documents: Sequence[str] = (CONFIG_NAME,),
) -> InspectedCheckpoint:
    """Read a directory, or the headers of a repository ``org/name[@revision]``.

    ``leave_out`` are shell patterns of files to skip; ``documents`` are JSON files to read.
    """
    directory = Path(place)
    if directory.is_dir():
        return _open_directory(directory)
    match = _REPOSITORY.fullmatch(place)
    if not match or place.startswith("/"):
        problem = "is neither a directory nor org/name[@revision]"
        raise InputError(place, problem, "check the spelling")
    name, revision = match[1], match[2] or "main"
    hub = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    files = RepositoryFiles(f"{hub}/{name}/resolve/{revision}/", transfer)

    def read_object(url: str, limit_bytes: int) -> dict[str, Any]:
        raw = files.client.read_whole(url, limit_bytes)
        return parse_object(raw, url, "check the repository")

    about = f"{hub}/api/models/{name}/revision/{revision}?blobs=true"
    listing = read_object(about, _LISTING_BYTES)
    commit = str(listing.get("sha"))
    if not re.fullmatch(COMMIT, commit):
        problem = f"has the invalid commit {commit[:60]!r} in the hub's answer"
        raise ValidationError(name, problem, "check the endpoint: this is not a hub")
    # By commit, because a push would mix two revisions.
    files = RepositoryFiles(f"{hub}/{name}/resolve/{commit}/", transfer)
    present = {
        path: size
        for path, size in _parse_listing(listing, name).items()
        if not any(fnmatch.fnmatchcase(path, pattern) for pattern in leave_out)
    }
    shards = [path for path in present if path.endswith(".safetensors") and "/" not in path]
    if not 0 < len(shards) <= _SHARD_LIMIT:
        raise ValidationError(
            name, f"lists {len(shards)} .safetensors files", "check the repository"
        )
    with ThreadPoolExecutor(transfer.parallel) as pool:
        headers = dict(zip(shards, pool.map(files.header, shards), strict=True))
    index = files.index() if INDEX_NAME in present else None
    contents = {
        path: read_object(files.url(path), _DOCUMENT_BYTES) for path in documents if path in present
    }
    return InspectedCheckpoint(
        place=f"{name}@{commit}",
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
        fix = "name the directory of a model"
        raise ValidationError(str(directory), "has no .safetensors file", fix)
    config = directory / CONFIG_NAME
    receipt, summary = load_receipt(directory), "none"
    if receipt is not None:
        name = receipt.name if isinstance(receipt, SourceReceipt) else receipt.plan.name
        summary = f"{receipt.kind} {name} digest {receipt.digest[:12]} of {receipt.written_at}"
    return InspectedCheckpoint(
        place=str(directory),
        shards={path.name: read_header(path) for path in paths},
        index=read_index(directory),
        config=read_json(config) if config.exists() else {},
        receipt=summary,
        files={name: (directory / name).stat().st_size for name in list_files(directory)},
    )


def _parse_listing(listing: Mapping[str, Any], name: str) -> dict[str, int | None]:
    siblings = listing.get("siblings")
    if isinstance(siblings, list):
        items = [item for item in siblings if isinstance(item, dict)]
        sizes = {
            item["rfilename"]: item["size"] if type(item.get("size")) is int else None
            for item in items
            if isinstance(item.get("rfilename"), str)
        }
        if len(sizes) == len(siblings):
            return sizes
    raise ValidationError(
        name, "the hub's answer contains no list of files", "check the endpoint and the repository"
    )


# The first match in a tensor name decides the part of the model.
_PART_PATTERNS = {
    "drafter": re.compile(r"(^|\.)mtp(_block)?\."),
    "vision": re.compile(
        r"(^|\.)(visual|vision_\w+|vit|audio_\w+|multi_modal_projector|mm_projector|"
        r"embed_vision|embed_audio|patch_merg\w+|image_newline|mlp1)(\.|$)"
    ),
}


def describe(subject: InspectedCheckpoint) -> RepositoryDescription:
    """Return the content of headers and documents, for files in the index."""
    loaded = set(subject.index.values()) if subject.index else set(subject.shards)
    if missing := sorted(loaded - subject.shards.keys()):
        problem = f"its index names {len(missing)} missing files, first {missing[0][:60]!r}"
        fix = "use another commit, because no engine can load this one"
        raise ValidationError(subject.place, problem, fix)
    shards = {name: header for name, header in subject.shards.items() if name in loaded}
    anatomy = summarise_headers(shards, None)
    drafter_layer = _first_drafter_layer(subject.config)
    parts: dict[str, Counter[str]] = {part: Counter() for part in ("text", *_PART_PATTERNS)}
    for name, tensor in anatomy.names.items():
        layer = re.search(r"(^|\.)layers\.(\d{1,6})\.", name)
        part = next(
            (part for part, pattern in _PART_PATTERNS.items() if pattern.search(name)), "text"
        )
        if drafter_layer is not None and layer and int(layer[2]) >= drafter_layer:
            part = "drafter"
        parts[part][tensor.dtype] += tensor.size_bytes
    return RepositoryDescription(
        commit=subject.place.rpartition("@")[2],
        parts={part: dict(sorted(sizes.items())) for part, sizes in parts.items()},
        tensors=len(anatomy.names),
        repeats_names=bool(anatomy.duplicates),
        files=dict(sorted(subject.files.items())),
        documents={path: dict(content) for path, content in subject.documents.items()},
    )


def _first_drafter_layer(config: Mapping[str, Any]) -> int | None:
    """Return the first drafter layer of models that append it, such as DeepSeek and GLM."""
    text = config.get("text_config")
    numbers = {**config, **(text if isinstance(text, dict) else {})}
    layers, drafts = (numbers.get(k) for k in ("num_hidden_layers", "num_nextn_predict_layers"))
    return layers if type(layers) is int and type(drafts) is int and drafts > 0 else None


_LAYER = re.compile(r"^model\.language_model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# The first match in a tensor name decides the group.
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


@dataclass(frozen=True, slots=True)
class Anatomy:
    names: dict[str, Tensor]  # the valid copies
    stored_bytes: int  # of all copies
    tensors: Counter[tuple[str, str]]  # by group and dtype
    sizes_bytes: Counter[tuple[str, str]]
    duplicates: list[str]
    unindexed: list[str]
    unknown_to_shards: list[str]
    layers: int
    linear_layers: int
    experts: int
    hidden: int
    mtp: int


def summarise_headers(shards: Mapping[str, Header], index: Mapping[str, str] | None) -> Anatomy:
    """Summarise headers; report contradictions instead of refusing them."""
    copies: dict[str, list[str]] = {}
    for shard in sorted(shards, key=natural_sort_key):
        for name in shards[shard].tensors:
            copies.setdefault(name, []).append(shard)
    names = {name: shards[files[-1]].tensors[name] for name, files in copies.items()}
    tensors: Counter[tuple[str, str]] = Counter()
    sizes_bytes: Counter[tuple[str, str]] = Counter()
    for name, tensor in names.items():
        group = next(
            (g for g, pattern in _GROUP_PATTERNS.items() if re.search(pattern, name)), "other"
        )
        tensors[group, tensor.dtype] += 1
        sizes_bytes[group, tensor.dtype] += tensor.size_bytes
    if index is None:
        index = {name: files[-1] for name, files in copies.items()}
    replaced = {original_name(name) for name in index if name != original_name(name)}
    replaced |= {"lm_head.weight"} if "lm_head.qweight" in replaced else set()
    layers = [(match[1], name) for name in names if (match := _LAYER.match(name))]
    norm = names.get("model.language_model.norm.weight")
    return Anatomy(
        names=names,
        stored_bytes=sum(t.size_bytes for h in shards.values() for t in h.tensors.values()),
        tensors=tensors,
        sizes_bytes=sizes_bytes,
        duplicates=[name for name, files in copies.items() if len(files) > 1],
        unindexed=sorted(copies.keys() - index.keys() - replaced),
        unknown_to_shards=sorted(n for n, shard in index.items() if shard not in copies.get(n, ())),
        layers=len({layer for layer, _ in layers}),
        linear_layers=len({layer for layer, name in layers if ".linear_attn." in name}),
        experts=len({expert[1] for _, name in layers if (expert := _EXPERT.search(name))}),
        hidden=norm.shape[0] if norm is not None and norm.shape else 0,
        mtp=sum(name.startswith(MTP_PREFIX) for name in names),
    )


def original_name(name: str) -> str:
    return name.removesuffix("_fp8").removesuffix("_int8")


def name_recipe(anatomy: Anatomy, quant_method: str | None, shard_names: frozenset[str]) -> str:
    shared = {dtype for group, dtype in anatomy.tensors if group == "shared experts"}
    experts = {dtype for group, dtype in anatomy.tensors if group == "routed experts"}
    if OVERLAY_SHARD in shard_names:
        kind = "hybrid, overlay layout (needs the plugin)"
    elif "I32" in experts and FP8 in shared:
        kind = "hybrid, full layout (needs the plugin)"
    elif "I32" in experts and "I32" in shared:
        kind = "INT4 with INT8 shared experts (plain auto-round, no plugin)"
    elif "I32" in experts:
        kind = "INT4 base"
    elif FP8 in experts:
        kind = "FP8 donor"
    elif experts:
        kind = f"{'/'.join(sorted(experts))} original"
    else:
        kind = "unknown"
    return f"{kind}, quant_method {quant_method}" if quant_method else kind


def find_missing_scales(anatomy: Anatomy) -> list[str]:
    missing = []
    for name in (name for name, tensor in anatomy.names.items() if tensor.dtype == FP8):
        scale = name.replace(".weight_fp8", f"{SCALE}_fp8")
        scale = scale if scale != name else name.removesuffix(".weight") + SCALE
        if scale not in anatomy.names:
            missing.append(name)
    return sorted(missing)


# Keys of quantization_config that describe storage.
_QUANTIZATION_KEYS = frozenset({"quant_method", "bits", "group_size", "sym", "data_type", "fmt",
                           "packing_format", "activation_scheme", "weight_block_size"})  # fmt: skip


def report(subject: InspectedCheckpoint) -> dict[str, Any]:
    anatomy = summarise_headers(subject.shards, subject.index)
    quantization = subject.config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    recipe = name_recipe(anatomy, quantization.get("quant_method"), frozenset(subject.shards))
    shards = subject.shards
    return {
        "place": subject.place,
        "receipt": subject.receipt,
        "model": subject.config.get("model_type"),
        "recipe": recipe,
        "shards": len(shards),
        "tensors": len(anatomy.names),
        "unique_bytes": anatomy.sizes_bytes.total(),
        "stored_bytes": anatomy.stored_bytes,
        "layers": anatomy.layers,
        "linear_layers": anatomy.linear_layers,
        "experts": anatomy.experts,
        "hidden": anatomy.hidden,
        "mtp_tensors": anatomy.mtp,
        "base_tensors": len(anatomy.names) - anatomy.mtp,
        "groups": [
            {"group": k[0], "dtype": k[1], "tensors": count, "bytes": anatomy.sizes_bytes[k]}
            for k, count in sorted(anatomy.tensors.items())
        ],
        "duplicates": len(anatomy.duplicates),
        "duplicate_groups": summarize_names(anatomy.duplicates),
        "index": "none" if subject.index is None else len(subject.index),
        "unindexed": summarize_names(anatomy.unindexed),
        "unknown_to_shards": summarize_names(anatomy.unknown_to_shards),
        "fp8_weights_without_scales": summarize_names(find_missing_scales(anatomy)),
        "block_name_to_quantize": quantization.get("block_name_to_quantize"),
        "quantization": {
            key: value
            for key, value in quantization.items()
            if key in _QUANTIZATION_KEYS and isinstance(value, str | int | float)
        },
        "files": [
            {"path": p, "bytes": size, "tensors": len(shards[p].tensors) if p in shards else None}
            for p, size in sorted(subject.files.items())
        ],
    }


def format_report(data: Mapping[str, Any]) -> str:
    quantization = ", ".join(f"{key} {value}" for key, value in data["quantization"].items())
    lines = [
        f"{data['place']}",
        f"  model      {data['model'] or 'no model_type in config.json'}",
        f"  recipe     {data['recipe']}",
        f"  quantised  {quantization or 'not in config.json'}",
        f"  receipt    {data['receipt']}",
        f"  layers     {data['layers']} ({data['linear_layers']} linear attention), "
        f"{data['experts']} experts, hidden {data['hidden']}",
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
        "duplicate_groups": "in several shards (the last is valid)",
        "unindexed": "in a shard but not in the index: the engine may skip the file",
        "unknown_to_shards": "in the index but not in that shard",
        "fp8_weights_without_scales": "FP8 weights without block scales",
    }
    problems = [f"  {text}: {data[key]}" for key, text in warnings.items() if data[key]]
    lines += ["", *problems] if problems else []
    lines += ["", f"  {'file':<50}{'tensors':>10}{'bytes':>18}"]
    for row in data["files"]:
        counts = ["-" if n is None else n for n in (row["tensors"], row["bytes"])]
        lines.append(f"  {row['path']:<50}{counts[0]:>10}{counts[1]:>18}")
    if data.get("against"):
        lines += ["", f"  {'compared with':<24}{'as':<10}"]
        for row in sorted(data["against"], key=lambda row: not row["fits"]):
            result = f"{'fits: ' if row['fits'] else 'no: '}{row['why'].split(' (')[0]}"
            lines.append(f"  {row['plan']:<24}{row['part']:<10}{result}")
    return "\n".join(lines)
