"""Report the content of a checkpoint directory or repository from headers alone."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_contract.fetching import Wire
from spark_contract.orders import BuildPlan, expand_all
from spark_contract.units import COMMIT

from spark_checkpoint.errors import GateRefused, InputRefused
from spark_checkpoint.format.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    files_of,
    read_index,
    read_json,
)
from spark_checkpoint.format.headers import Header, read_header
from spark_checkpoint.inspect.anatomy import examine, plain_name, recipe_of, scales_missing
from spark_checkpoint.sources.donor import UrlFiles
from spark_checkpoint.tensor_sets import (
    MTP_PREFIX,
    base_patterns,
    check_result_names,
    check_same_names,
    groups,
    replacements,
)
from spark_checkpoint.verify import read_receipt_line

DEFAULT_ENDPOINT = "https://huggingface.co"
_REPOSITORY = re.compile(r"([A-Za-z0-9._-]+/[A-Za-z0-9._-]+)(?:@([A-Za-z0-9._-]+))?")
_LISTING_BYTES = 64 << 20
_DOCUMENT_BYTES = 8 << 20  # several times the largest known: one that names each module's bits
_MOST_SHARDS = 4096
# Keys of quantization_config that describe storage.
_QUANTIZATION = frozenset({"quant_method", "bits", "group_size", "sym", "data_type", "fmt",
                           "packing_format", "activation_scheme", "weight_block_size"})  # fmt: skip
# Kind of a plan's result, by its shared experts.
_KINDS = {
    "fp8-donor": "hybrid",
    "fp8-self": "hybrid",
    "fp8-base": "hybrid",
    "int8-g128": "tree with INT8 shared experts",
    "keep": "tree with the base's shared experts",
}


@dataclass(frozen=True, slots=True)
class Subject:
    place: str
    shards: Mapping[str, Header]
    index: Mapping[str, str] | None
    config: Mapping[str, Any]
    receipt: str
    files: Mapping[str, int | None]  # path -> size; the hub reports sizes of a repository
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # config.json and more


def open_subject(
    text: str,
    endpoint: str | None,
    wire: Wire,
    *,
    leave_out: Sequence[str] = (),
    documents: Sequence[str] = (CONFIG_NAME,),
) -> Subject:
    """Read a directory, or the headers of a repository ``org/name[@revision]``.

    ``leave_out`` are shell patterns of repository files to skip; ``documents`` are small JSON files
    to read if the repository has them.
    """
    directory = Path(text)
    if directory.is_dir():
        return _open_directory(directory)
    match = _REPOSITORY.fullmatch(text)
    if not match or text.startswith("/"):
        raise InputRefused(
            text, "is neither a directory nor org/name[@revision]", "check the spelling"
        )
    base = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    return _open_repository(base, match[1], match[2] or "main", wire, leave_out, documents)


def report(subject: Subject) -> dict[str, Any]:
    found = examine(subject.shards, subject.index)
    quantization = subject.config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    return {
        "place": subject.place,
        "receipt": subject.receipt,
        "model": subject.config.get("model_type"),
        "recipe": recipe_of(found, quantization.get("quant_method"), frozenset(subject.shards)),
        "shards": len(subject.shards),
        "tensors": len(found.names),
        "unique_bytes": found.sizes_bytes.total(),
        "stored_bytes": found.stored_bytes,
        "layers": found.layers,
        "linear_layers": found.linear_layers,
        "experts": found.experts,
        "hidden": found.hidden,
        "mtp_tensors": found.mtp,
        "base_tensors": len(found.names) - found.mtp,
        "groups": [
            {"group": k[0], "dtype": k[1], "tensors": count, "bytes": found.sizes_bytes[k]}
            for k, count in sorted(found.tensors.items())
        ],
        "duplicates": len(found.duplicates),
        "duplicate_groups": groups(found.duplicates),
        "index": "none" if subject.index is None else len(subject.index),
        "unindexed": groups(found.unindexed),
        "unknown_to_shards": groups(found.unknown_to_shards),
        "fp8_weights_without_scales": groups(scales_missing(found)),
        "block_name_to_quantize": quantization.get("block_name_to_quantize"),
        "quantization": {
            key: value
            for key, value in quantization.items()
            if key in _QUANTIZATION and isinstance(value, str | int | float)
        },
        "files": [
            {
                "path": path,
                "bytes": size,
                "tensors": len(subject.shards[path].tensors) if path in subject.shards else None,
            }
            for path, size in sorted(subject.files.items())
        ],
    }


def text_of(data: Mapping[str, Any]) -> str:
    stated = ", ".join(f"{key} {value}" for key, value in data["quantization"].items())
    lines = [
        f"{data['place']}",
        f"  model      {data['model'] or 'config.json names no type'}",
        f"  recipe     {data['recipe']}",
        f"  quantised  {stated or 'config.json says nothing of it'}",
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
    remarks = {
        "duplicate_groups": "in several shards (the last one counts)",
        "unindexed": "in a shard but not in the index: the engine may skip the file",
        "unknown_to_shards": "in the index but not in that shard",
        "fp8_weights_without_scales": "FP8 weights without block scales",
    }
    found = [f"  {text}: {data[key]}" for key, text in remarks.items() if data[key]]
    lines += ["", *found] if found else []
    lines += ["", f"  {'file':<50}{'tensors':>10}{'bytes':>18}"]
    lines += [
        f"  {row['path']:<50}{_counted(row['tensors']):>10}{_counted(row['bytes']):>18}"
        for row in data["files"]
    ]
    if data.get("against"):
        lines += ["", f"  {'held against':<24}{'as':<10}"]
        # What fits comes first; the groups of names that differ stand in the JSON.
        rows = sorted(data["against"], key=lambda row: not row["fits"])
        lines += [
            f"  {row['plan']:<24}{row['part']:<10}{'fits: ' if row['fits'] else 'no: '}"
            f"{row['why'].split(' (')[0]}"
            for row in rows
        ]
    return "\n".join(lines)


def _counted(number: int | None) -> str:
    return "-" if number is None else str(number)


def match_plan_names(subject: Subject, plan: BuildPlan) -> str:
    """Return whether a subject is a plan's base or its result; refuse anything else."""
    names = _held(subject)
    new = {name for stand_ins in replacements(plan).values() for name in stand_ins}
    expected = expand_all(base_patterns(plan))
    overlaid = any(name != plain_name(name) for name in names)
    if overlaid or not (new - expected).isdisjoint(names):
        layout = "overlay" if overlaid else "full"
        check_result_names(subject.place, names, plan, layout)
        return f"a {_KINDS[plan.shared_experts]} with exactly the plan's names"
    mtp = expand_all(plan.mtp_tensors)
    found_mtp = {name for name in names if name.startswith(MTP_PREFIX)}
    check_same_names(subject.place, "base tensors", names - found_mtp, expected)
    if found_mtp - mtp:
        check_same_names(subject.place, "MTP tensors", found_mtp, mtp)
    missing = len(mtp - found_mtp)
    return f"the plan's base ({missing} MTP tensors to graft)" if missing else "the plan's base"


def _held(subject: Subject) -> set[str]:
    """Return the names an engine loads: an overlay's shards still hold the names it replaces."""
    if not subject.index:
        return set(examine(subject.shards, None).names)
    return {
        name
        for name, shard in subject.index.items()
        if shard in subject.shards and name in subject.shards[shard].tensors
    }


def _open_directory(directory: Path) -> Subject:
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise GateRefused(str(directory), "holds no .safetensors file", "name a model's directory")
    config = directory / CONFIG_NAME
    return Subject(
        place=str(directory),
        shards={path.name: read_header(path) for path in paths},
        index=read_index(directory),
        config=read_json(config) if config.exists() else {},
        receipt=read_receipt_line(directory),
        files={name: (directory / name).stat().st_size for name in files_of(directory)},
    )


def _open_repository(
    endpoint: str,
    name: str,
    revision: str,
    wire: Wire,
    leave_out: Sequence[str],
    documents: Sequence[str],
) -> Subject:
    files = UrlFiles(f"{endpoint}/{name}/resolve/{revision}/", wire)
    about = f"{endpoint}/api/models/{name}/revision/{revision}?blobs=true"
    listing = files.small_json(about, _LISTING_BYTES)
    commit = str(listing.get("sha"))
    if not re.fullmatch(COMMIT, commit):
        what = f"names the commit {commit[:60]!r} in the hub's answer"
        raise GateRefused(name, what, "check the endpoint: this is no hub")
    # Use the commit from here on: a push must not mix two revisions.
    files = UrlFiles(f"{endpoint}/{name}/resolve/{commit}/", wire)
    present = {
        path: size
        for path, size in _listed(listing, name).items()
        if not any(fnmatch.fnmatchcase(path, pattern) for pattern in leave_out)
    }
    shards = [path for path in present if path.endswith(".safetensors") and "/" not in path]
    if not shards:
        raise GateRefused(name, "lists no .safetensors file", "check the repository")
    if len(shards) > _MOST_SHARDS:
        raise GateRefused(name, f"lists {len(shards)} .safetensors files", "check the repository")
    with ThreadPoolExecutor(wire.parallel) as pool:
        headers = dict(zip(shards, pool.map(files.header, shards), strict=True))
    index = files.index() if INDEX_NAME in present else None
    read = {
        path: files.small_json(files.url(path), _DOCUMENT_BYTES)
        for path in documents
        if path in present
    }
    return Subject(
        place=f"{name}@{commit}",
        shards=headers,
        index=index,
        config=read.get(CONFIG_NAME, {}),
        receipt=f"none (read {files.transport.received_bytes} bytes of headers)",
        files=present,
        documents=read,
    )


def _listed(listing: Mapping[str, Any], name: str) -> dict[str, int | None]:
    """Return file sizes from the hub's listing."""
    siblings = listing.get("siblings")
    if isinstance(siblings, list):
        items = [item for item in siblings if isinstance(item, dict)]
        listed = [(item.get("rfilename"), item.get("size")) for item in items]
        found = {path: size for path, size in listed if isinstance(path, str)}
        if len(found) == len(siblings):
            return {path: size if type(size) is int else None for path, size in found.items()}
    raise GateRefused(
        name, "has no list of files in the hub's answer", "check the endpoint and the repository"
    )
