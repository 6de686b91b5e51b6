"""Checkpoints of the engine proofs: from the lab's generator and the product's builder.

``wide``: random weights with real shapes of every layer kind. ``tiny``: the lab's trained model.
Damaged copies are named after the damage.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lab.model import original, repository, vocabulary
from lab.model.safetensors import INDEX, read_file, write_file
from lab.model.shape import Shape

FILES = Path(__file__).resolve().parents[2] / "files"
WIDE = Shape(
    hidden=512,
    vocabulary=4096,
    experts_per_token=8,  # all of them: no routing flips between kernels
    shared_width=256,
    head_dim=256,
    linear_key_heads=8,
    linear_value_heads=32,
    linear_head_dim=128,
)
SEED = 7
VARIANTS: dict[str, dict[str, str]] = {
    "overlay": {"layout": "overlay", "head": "keep", "shared_experts": "fp8-donor"},
    "full": {"layout": "full", "head": "keep", "shared_experts": "fp8-donor"},
    "overlay-head8": {"layout": "overlay", "head": "int8-g128", "shared_experts": "fp8-donor"},
    "full-head8": {"layout": "full", "head": "int8-g128", "shared_experts": "fp8-donor"},
    "native": {"layout": "full", "head": "int8-g128", "shared_experts": "int8-g128"},
    "base-head8": {"layout": "full", "head": "int8-g128", "shared_experts": "keep"},
    "v3": {
        "layout": "overlay", "head": "keep", "shared_experts": "fp8-donor", "drafter": "int4-g128",
    },
}  # fmt: skip
_INT4_DRAFTER = re.compile(r"mtp\.layers\.\d+\.(mlp\.experts|self_attn)\..*_proj\.weight")


def write_wide(out: Path) -> tuple[Path, Path]:
    tokenizer = vocabulary.train(1024)
    weights = original.random_weights(WIDE, SEED)
    base, donor = out / "wide-base", out / "wide-donor"
    repository.write_int4(base, WIDE, weights, tokenizer, "random")
    repository.write_fp8(donor, WIDE, weights, tokenizer, "random")
    return base, donor


def copy_trained(out: Path, hub: Path) -> tuple[Path, Path]:
    trees = []
    for kind, name in (("base", "tiny-int4"), ("donor", "tiny-fp8")):
        commit = (hub / "lab" / name / "refs" / "main").read_text().strip()
        trees.append(out / f"tiny-{kind}")
        shutil.copytree(hub / "lab" / name / commit, trees[-1])
    return trees[0], trees[1]


def names_of(tree: Path) -> set[str]:
    return set(json.loads((tree / INDEX).read_text())["weight_map"])


def plan(base: Path, donor: Path, out: Path, variant: dict[str, str]) -> dict[str, Any]:
    base_names, donor_names = names_of(base), names_of(donor)
    own = {name for name in base_names if not name.startswith("mtp.")}
    modules = sorted(
        name.removesuffix(".weight")
        for name in own
        if ".mlp.shared_expert." in name and name.endswith("_proj.weight")
    )
    swapped = {f"{module}.{part}" for module in modules for part in ("weight", "weight_scale_inv")}
    unmatched = {name for name in donor_names - own - swapped if ".mlp.experts." not in name}
    drafter = [n.removesuffix(".weight") for n in base_names - own if _INT4_DRAFTER.fullmatch(n)]
    return plain_plan(
        base,
        out,
        donor={"dir": str(donor)} if variant["shared_experts"] == "fp8-donor" else None,
        swap=modules,
        donor_unmatched=sorted(unmatched),
        drafter_int4=sorted(drafter) if "drafter" in variant else [],
        **{key: choice for key, choice in variant.items() if key != "drafter"},
    )


def plain_plan(base: Path, out: Path, **choices: Any) -> dict[str, Any]:
    """Return a plan that copies all tensors of ``base``, except for the fields in ``choices``."""
    names = sorted(names_of(base))
    return {
        "schema_version": 1,
        "digest": hashlib.sha256(out.name.encode()).hexdigest(),
        "name": out.name,
        "base": {"dir": str(base), "revision": None},
        "donor": None,
        "swap": [],
        "block_shape": [128, 128],
        "base_tensors": [name for name in names if not name.startswith("mtp.")],
        "donor_unmatched": [],
        "donor_shapes": [],
        "extra": {},
        "mtp_tensors": [name for name in names if name.startswith("mtp.")],
        "out": str(out),
        "layout": "full",
        "head": "keep",
        "shared_experts": "keep",
        **choices,
    }


def build(content: dict[str, Any], work: Path) -> None:
    path = work / f"{content['name']}.plan.json"
    path.write_text(json.dumps(content))
    subprocess.run(
        [sys.executable, "-m", "spark_checkpoint", "build", str(path)],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": f"{FILES / 'contract'}:{FILES / 'checkpoint'}"},
    )


def damaged(good: Path, name: str) -> Path:
    target = good.with_name(f"{good.name}-{name}")
    shutil.copytree(good, target)
    return target


def edit_json(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.unlink()
    path.write_text(json.dumps(content, indent=1))


def _tensor(tree: Path, name: str) -> tuple[Path, int, int, dict[str, Any]]:
    path = tree / json.loads((tree / INDEX).read_text())["weight_map"][name]
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
    start, end = entry["data_offsets"]
    return path, 8 + size + start, 8 + size + end, entry


def rewrite(tree: Path, name: str, data: bytes) -> None:
    path, start, end, _ = _tensor(tree, name)
    if end - start != len(data):
        raise ValueError(f"{name}: {len(data)} bytes for a slot of {end - start}")
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def stored_bytes(tree: Path, name: str) -> bytes:
    path, start, end, _ = _tensor(tree, name)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def drop_names(tree: Path, dropped: set[str]) -> None:
    index = json.loads((tree / INDEX).read_text())
    for name in dropped:
        path = tree / index["weight_map"].pop(name)
        tensors = read_file(path)
        del tensors[name]
        write_file(path, tensors)
    (tree / INDEX).write_text(json.dumps(index))


def damage(full: Path, overlay: Path) -> Iterator[Path]:
    layer = "model.language_model.layers.{}.mlp.shared_expert.{}_proj"
    tree = damaged(full, "no-mtp-file")
    mtp = {name for name in names_of(tree) if name.startswith("mtp.")}
    files = {json.loads((tree / INDEX).read_text())["weight_map"][name] for name in mtp}
    edit_json(tree / INDEX, lambda index: [index["weight_map"].pop(name) for name in mtp])
    unindexed = damaged(tree, "x").rename(full.with_name(f"{full.name}-mtp-not-in-index"))
    yield unindexed
    for file in files:
        (tree / file).unlink()
    yield tree
    tree = damaged(full, "two-mtp-tensors-missing")
    drop_names(tree, {"mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"})
    yield tree
    for part in ("up", "down"):
        tree = damaged(full, f"no-{part}-scale")
        drop_names(tree, {layer.format(1, part) + ".weight_scale_inv"})
        yield tree
    tree = damaged(overlay, "no-up-scale")
    drop_names(tree, {layer.format(1, "up") + ".weight_scale_inv_fp8"})
    yield tree
    tree = damaged(full, "no-block-names")
    edit_json(
        tree / "config.json",
        lambda config: config["quantization_config"].pop("block_name_to_quantize"),
    )
    yield tree
    tree = damaged(full, "wrong-scale")
    name = layer.format(1, "gate") + ".weight_scale_inv"
    scales = np.frombuffer(stored_bytes(tree, name), dtype="<u2").reshape(
        _tensor(tree, name)[3]["shape"]
    )
    rewrite(tree, name, np.roll(scales, 1, axis=1).tobytes())
    yield tree
    tree = damaged(full, "swapped-layers")
    for suffix in (".weight", ".weight_scale_inv"):
        first_name, second_name = layer.format(0, "down") + suffix, layer.format(1, "down") + suffix
        first, second = stored_bytes(tree, first_name), stored_bytes(tree, second_name)
        rewrite(tree, first_name, second)
        rewrite(tree, second_name, first)
    yield tree
