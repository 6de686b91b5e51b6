"""The lab's prebuilt hybrid: the base's names, the donor's shared experts, made once."""

import json

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from lab.hybrid import BASE, DONOR, NAME, ensure_hybrid

SHARED = "model.language_model.layers.0.mlp.shared_expert.up_proj"
BASE_TENSORS = {
    "lm_head.weight": b"head",
    "model.norm.weight": b"norm",
    f"{SHARED}.weight": b"sixteen!",
    "mtp.fc.weight": b"mtp.",
}
DONOR_TENSORS = {
    "model.norm.weight": b"none",
    f"{SHARED}.weight": b"fp8.",
    f"{SHARED}.weight_scale_inv": b"sc",
}


def published(hub, name, commit, tensors):
    tree = hub / name / commit
    tree.mkdir(parents=True)
    save_file(
        {name: np.frombuffer(data, np.uint8) for name, data in tensors.items()},
        tree / "model-00001-of-00001.safetensors",
    )
    (tree / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe"}))
    (tree / "tokenizer.json").write_text("{}")
    (hub / name / "refs").mkdir(exist_ok=True)
    (hub / name / "refs/main").write_text(commit + "\n")


@pytest.fixture
def hub(tmp_path):
    published(tmp_path, BASE, "b" * 40, BASE_TENSORS)
    published(tmp_path, DONOR, "d" * 40, DONOR_TENSORS)
    return tmp_path


def made(hub):
    commit = (hub / NAME / "refs/main").read_text().strip()
    tree = hub / NAME / commit
    found = {}
    for shard in tree.glob("*.safetensors"):
        for name, entry in safetensors.deserialize(shard.read_bytes()):
            found[name] = (shard.name, bytes(entry["data"]))
    index = json.loads((tree / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: shard for name, (shard, _) in found.items()}
    return tree, {name: data for name, (_, data) in found.items()}


def test_it_has_the_bases_names_with_the_donors_shared_experts(hub):
    ensure_hybrid(hub)
    tree, tensors = made(hub)
    shared = {name: data for name, data in DONOR_TENSORS.items() if SHARED in name}
    assert tensors == {**BASE_TENSORS, **shared}
    assert (tree / "tokenizer.json").exists()
    assert "_hybrid_quant_info" in json.loads((tree / "config.json").read_text())


def test_it_is_made_once_and_again_only_when_a_repository_moved(hub):
    ensure_hybrid(hub)
    before, _ = made(hub)
    inode = before.stat().st_ino
    ensure_hybrid(hub)
    assert made(hub)[0].stat().st_ino == inode
    published(hub, DONOR, "e" * 40, {**DONOR_TENSORS, f"{SHARED}.weight": b"FP8!"})
    ensure_hybrid(hub)
    after, tensors = made(hub)
    assert after != before
    assert tensors[f"{SHARED}.weight"] == b"FP8!"
