"""Repositories and inventories for lab-tiny: names and shapes without weights."""

import hashlib
import json
from pathlib import Path

from spark_contract.builder_api import expand_all

from spark_deploy.config.checkout import CHECKOUT
from tests.unit.checkpoint.builder_hub import Hub
from tests.unit.planning.plans import shipped_catalog

CATALOG = shipped_catalog()
TENSORS = CATALOG.model("lab-tiny").tensors
BASE, DONOR = "lab/tiny-int4", "lab/tiny-fp8"
COMMITS = {BASE: "1" * 40, DONOR: "2" * 40}
BITS = {"BF16": 16, "F16": 16, "I32": 32, "F8_E4M3": 8}
Entries = dict[str, tuple[str, tuple[int, ...]]]


def modules() -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    return {
        module: (part.weight, part.scale)
        for part in TENSORS.donor_shapes
        for module in expand_all([part.modules])
    }


def base_entries() -> Entries:
    result: Entries = {}
    for name in sorted(expand_all(TENSORS.base) | expand_all(TENSORS.mtp)):
        result[name] = ("I32" if name.endswith(("qweight", "qzeros")) else "BF16", (1,))
    for module, (weight, _) in modules().items():
        result[f"{module}.weight"] = ("BF16", weight)
    result["lm_head.weight"] = ("BF16", (1024, 256))
    return result


def donor_entries() -> Entries:
    result: Entries = {name: ("BF16", (1,)) for name in sorted(expand_all(TENSORS.donor_unmatched))}
    for module, (weight, scale) in modules().items():
        result[f"{module}.weight"] = ("F8_E4M3", weight)
        result[f"{module}.weight_scale_inv"] = ("BF16", scale)
    return result


def write_repository(
    root: Path,
    repo: str,
    entries: Entries,
    commit: str | None = None,
    config: dict[str, object] | None = None,
) -> Path:
    """Write a repository of two shards below the root of a hub; return the folder."""
    commit = commit or COMMITS[repo]
    folder = root / repo / "resolve" / commit
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for number in range(2):
        name = f"model-0000{number + 1}-of-00002.safetensors"
        shard = dict(list(entries.items())[number::2])
        write_shard(folder / name, shard)
        index.update(dict.fromkeys(shard, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = config or {
        "model_type": "tiny",
        "quantization_config": {"quant_method": "auto-round", "bits": 4},
    }
    (folder / "config.json").write_text(json.dumps(config))
    siblings = [sibling(path) for path in sorted(folder.iterdir())]
    for revision in ("main", commit):
        listing = root / "api/models" / repo / "revision" / revision
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text(json.dumps({"id": repo, "sha": commit, "siblings": siblings}))
    return folder


def sibling(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    result: dict[str, object] = {"rfilename": path.name, "size": len(data), "blobId": "b" * 40}
    if path.suffix == ".safetensors":
        digest = hashlib.sha256(data).hexdigest()
        result["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
    return result


def write_shard(path: Path, entries: Entries) -> None:
    """Write a header, and a hole instead of weights."""
    document, position = {}, 0
    for name, (dtype, shape) in entries.items():
        size = BITS[dtype] // 8
        for length in shape:
            size *= length
        document[name] = {
            "dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]
        }  # fmt: skip
        position += size
    raw = json.dumps(document).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)


def write_inventory(folder: Path, variables: str, host: str = "spark-1") -> None:
    (folder / "group_vars").mkdir(parents=True)
    (folder / "group_vars/lab.yml").write_text(variables)
    (folder / "inventory.py").write_text(
        f"import sys as _sys; _sys.path.insert(0, {str(CHECKOUT)!r})\n"
        "from spark_deploy.inventory.groups import group_from as _group_from\n"
        f'lab = _group_from("lab", hosts=["{host}"], file=__file__)\n'
    )


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def requested_ranges(hub: Hub, repo: str) -> list[tuple[Path, int]]:
    return [
        (hub.root / path.lstrip("/"), int(headers["Range"].rpartition("-")[2]))
        for path, headers, _ in hub.requests
        if path.startswith(f"/{repo}/") and path.endswith(".safetensors")
    ]
