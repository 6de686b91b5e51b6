"""The lab's model repositories: generated repositories, a hybrid of them, the 16-bit original."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from lab.content import content_key
from lab.hub.store import commit_id
from lab.paths import LabPaths

SIXTEEN_BIT = "lab/tiny"
HYBRID, BASE, DONOR = "lab/tiny-hybrid", "lab/tiny-int4", "lab/tiny-fp8"
INDEX = "model.safetensors.index.json"
_SHARDS = 3

MODEL_DIR = Path(__file__).with_name("model")


def ensure_models(paths: LabPaths) -> None:
    from lab.model.build import build

    key = content_key("model", trees=[MODEL_DIR])
    mark = paths.hub / ".model.json"
    if not mark.exists() or json.loads(mark.read_text()).get("key") != key:
        build(paths.hub)
        mark.write_text(json.dumps({"key": key}))
    _ensure_hybrid(paths.hub)
    _ensure_sixteen_bit(paths.hub)


def _ensure_sixteen_bit(hub: Path) -> None:
    key = content_key("16-bit", trees=[MODEL_DIR, Path(__file__)])
    mark = hub / ".sixteen-bit.json"
    if mark.exists() and json.loads(mark.read_text()) == {"key": key}:
        return
    from lab.model import repository, vocabulary, weights
    from lab.model.shape import TINY
    from lab.model.spread import spread

    work = hub / ".sixteen-bit.part"
    shutil.rmtree(work, ignore_errors=True)
    trained = spread(TINY, weights.read(TINY))
    repository.write_plain(work, TINY, trained, vocabulary.train(TINY.vocabulary))
    repository.publish(hub, SIXTEEN_BIT, [work])
    mark.write_text(json.dumps({"key": key}))


class Stored(NamedTuple):
    dtype: str
    shape: list[int]
    data: bytes


def _ensure_hybrid(hub: Path) -> None:
    heads = {name: (hub / name / "refs/main").read_text().strip() for name in (BASE, DONOR)}
    key = content_key("hybrid", heads, trees=[Path(__file__)])
    mark = hub / ".hybrid.json"
    if mark.exists() and json.loads(mark.read_text()) == {"key": key}:
        return
    work = hub / ".hybrid.part"
    shutil.rmtree(work, ignore_errors=True)
    _write_tree(work, hub / BASE / heads[BASE], hub / DONOR / heads[DONOR])
    files = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in work.iterdir()]
    commit = commit_id(files, f"{heads[BASE]} {heads[DONOR]}")
    target = hub / HYBRID / commit
    shutil.rmtree(target, ignore_errors=True)
    (hub / HYBRID / "refs").mkdir(parents=True, exist_ok=True)
    work.rename(target)
    (hub / HYBRID / "refs/main").write_text(f"{commit}\n")
    mark.write_text(json.dumps({"key": key}))


def _write_tree(out: Path, base: Path, donor: Path) -> None:
    out.mkdir()
    base_tensors, donor_tensors = _read_tree(base), _read_tree(donor)
    mtp = {name: stored for name, stored in base_tensors.items() if name.startswith("mtp.")}
    tensors = {name: stored for name, stored in base_tensors.items() if name not in mtp}
    for name in [name for name in tensors if ".mlp.shared_expert." in name]:
        tensors[name] = donor_tensors[name]
        scale = name.replace(".weight", ".weight_scale_inv")
        tensors[scale] = donor_tensors[scale]
    # Sorted by name, unlike any file of the base.
    names = sorted(tensors)
    shards = {
        f"model-{number + 1:05}-of-{_SHARDS:05}.safetensors": {
            name: tensors[name] for name in names[number::_SHARDS]
        }
        for number in range(_SHARDS)
    }
    shards["model_extra_tensors.safetensors"] = mtp
    for shard, content in shards.items():
        _write_shard(out / shard, content)
    weight_map = {name: shard for shard, content in shards.items() for name in content}
    total = sum(len(stored.data) for content in shards.values() for stored in content.values())
    _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for path in base.iterdir():
        if path.suffix != ".safetensors" and path.name not in (INDEX, "config.json"):
            shutil.copy(path, out / path.name)
    config = json.loads((base / "config.json").read_text())
    _write_json(out / "config.json", {**config, "_hybrid_quant_info": {"fp8_layers": "shared"}})


def _read_tree(directory: Path) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                data = raw[start + begin : start + end]
                tensors[name] = Stored(entry["dtype"], entry["shape"], data)
    return tensors


def _write_shard(path: Path, tensors: dict[str, Stored]) -> None:
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [position, position + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        position += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(stored.data for stored in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
