"""Checkpoints of the recall model: INT4 base, FP8 donor, and the hybrid that a Spark serves."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.model import original, repository, vocabulary
from lab.model.original import Floats
from lab.model.rounding import bf16_values
from lab.model.shape import Shape
from proofs.recall.language import VOCABULARY
from proofs.trees import build as trees
from proofs.trees import special

HERE = Path(__file__).parent
WEIGHTS = "weights.npz"


def store(directory: Path, bits: Mapping[str, npt.NDArray[np.uint16]]) -> Path:
    """Store BF16 weights: high bytes, which compress well, separate from low bytes."""
    planes = {
        name: np.stack([values >> 8, values & 0xFF]).astype(np.uint8)
        for name, values in bits.items()
    }
    path = directory / WEIGHTS
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        np.savez_compressed(out, allow_pickle=False, **planes)
    part.rename(path)
    return path


def load(directory: Path = HERE) -> dict[str, Floats]:
    with np.load(directory / WEIGHTS, allow_pickle=False) as stored:
        planes = {name: stored[name].astype(np.uint16) for name in stored.files}
    return {name: bf16_values(high << 8 | low) for name, (high, low) in planes.items()}


RECALL = Shape(
    layers=4,
    attention_interval=2,
    hidden=256,
    vocabulary=VOCABULARY,
    experts=4,
    experts_per_token=4,  # all of them: no routing flips between kernels
    expert_width=256,
    shared_width=256,
    heads=4,
    kv_heads=2,
    head_dim=256,  # that of Qwen3.5, as are the next ones' 128
    linear_key_heads=2,
    linear_value_heads=8,
    linear_head_dim=128,
    max_positions=262144,
)


SEED = 11
NAME = "recall"
WORDS = 512
INT4_DRAFTS = "recall-int4-drafts"
"""The same hybrid, the drafter's experts and attention in INT4 as the 35B's base has them."""
V3 = "recall-v3"
"""The hybrid of profile ``v3``: our builder rounded the drafter to INT4, the head has 16 bits."""
UNUSED = 8
"""First of the ids that the language leaves free; the configuration's special tokens go there."""
SPECIAL = ("image_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id")


def read_weights(directory: Path = HERE) -> dict[str, Floats]:
    weights = original.random_weights(RECALL, SEED)
    wanted = {name for name in weights if ".visual." not in name}
    for name, value in load(directory).items():
        if weights[name].shape != value.shape:
            raise ValueError(f"{name}: {value.shape}, not {weights[name].shape}")
        weights[name] = value
        wanted.discard(name)
    if wanted:
        raise ValueError(f"{directory} lacks {len(wanted)} tensors, one is {min(wanted)}")
    return weights


def make(weights: dict[str, Floats], out: Path) -> None:
    work = out / "work"
    work.mkdir(parents=True)
    base, donor = write_sources(weights, out)
    hybrid = trees.VARIANTS["overlay-head8"]
    trees.build(trees.plan(base, donor, out / NAME, hybrid), work)
    trees.build(trees.plan(base, donor, out / V3, trees.VARIANTS["v3"]), work)
    packed = out / f"{INT4_DRAFTS}-base"
    shutil.copytree(base, packed)
    special.pack_drafter(packed, weights)
    trees.build(trees.plan(packed, donor, out / INT4_DRAFTS, hybrid), work)


def write_sources(weights: dict[str, Floats], out: Path) -> tuple[Path, Path]:
    tokenizer = vocabulary.train(WORDS)
    base, donor = out / f"{NAME}-base", out / f"{NAME}-donor"
    repository.write_int4(base, RECALL, weights, tokenizer, "recall")
    repository.write_fp8(donor, RECALL, weights, tokenizer, "recall")
    for tree in (base, donor):
        move_special_tokens(tree / "config.json")
    return base, donor


def move_special_tokens(path: Path) -> None:
    config: dict[str, Any] = json.loads(path.read_text())
    for number, name in enumerate(SPECIAL):
        config[name] = UNUSED + number
    config["text_config"]["eos_token_id"] = UNUSED + len(SPECIAL)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
