"""Checkpoints of these proofs.

``pair-*``: the recall model for two GPUs, in both layouts. ``plain-*``: the lab's model in formats
of public repositories. ``seeing``: the lab's model with a vision tower that names colors;
``seeing-other`` has the untrained tower, ``seeing-blind`` a zeroed patch embedding.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.model import repository, rounding, vocabulary
from lab.model import weights as stored
from lab.model.original import Floats
from lab.model.shape import TINY
from lab.model.spread import spread
from proofs.recall import trees as recall_trees
from proofs.trees import build as trees

GROUP = 128
LAYOUTS = {"pair-overlay": "overlay-head8", "pair-full": "full-head8"}
VISION = "model.visual."


def publish_plain(store: Path, kind: str) -> None:
    tree = store.parent / f"plain-{kind}"
    write_plain(tree, kind)
    repository.publish(store, f"lab/tiny-{kind}", [tree])


def write_plain(out: Path, kind: str) -> None:
    tokenizer = vocabulary.train(TINY.vocabulary)
    weights = spread(TINY, stored.read(TINY))
    if kind == "fp8":
        repository.write_fp8(out, TINY, weights, tokenizer, "FP8")
    else:
        repository.write_plain(out, TINY, weights, tokenizer)


def widen_for_two_gpus(weights: dict[str, Floats]) -> dict[str, Floats]:
    """Return the same model with experts twice as wide, to split over two GPUs.

    Each GPU gets a copy of every expert with half weight, exact in INT4 and BF16. The second copy
    reverses the groups of 128, so that a confused scale gives wrong results.
    """
    wide = dict(weights)
    for name, values in weights.items():
        if ".mlp.experts." not in name:
            continue
        axis = 1 if name.endswith("down_proj.weight") else 0
        groups = np.split(values, values.shape[axis] // GROUP, axis=axis)
        both = np.concatenate([*groups, *reversed(groups)], axis=axis)
        wide[name] = both / 2 if axis else both
    return wide


def make_pair(weights: dict[str, Floats], out: Path) -> None:
    shape = recall_trees.RECALL
    tokenizer = vocabulary.train(recall_trees.WORDS)
    base, donor = out / "pair-base", out / "pair-donor"
    wide = widen_for_two_gpus(weights)
    wider = replace(shape, expert_width=2 * shape.expert_width)
    repository.write_int4(base, wider, wide, tokenizer, "recall for two")
    repository.write_fp8(donor, wider, wide, tokenizer, "recall for two")
    for tree in (base, donor):
        recall_trees.move_special_tokens(tree / "config.json")
    _hybrids(base, donor, out, LAYOUTS)


def make_seeing(eyes: Path, out: Path) -> None:
    tokenizer = vocabulary.train(TINY.vocabulary)
    with np.load(eyes) as stored_weights:
        weights = {name: stored_weights[name].astype(np.float32) for name in stored_weights.files}
    if missing := stored.read(TINY).keys() - weights.keys():
        raise ValueError(f"{eyes} lacks {len(missing)} tensors, one is {min(missing)}")
    base, donor = out / "seeing-base", out / "seeing-donor"
    repository.write_int4(base, TINY, spread(TINY, weights), tokenizer, "seeing")
    repository.write_fp8(donor, TINY, spread(TINY, weights), tokenizer, "seeing")
    _hybrids(base, donor, out, {"seeing": "overlay-head8"})


def damage_eyes(good: Path) -> None:
    towers = {name: value for name, value in stored.read(TINY).items() if name.startswith(VISION)}
    for name in ("other", "blind"):
        tree = trees.damaged(good, name)
        for tensor, values in towers.items():
            if name == "other":
                trees.rewrite(tree, tensor, rounding.bf16_bits(values).tobytes())
            elif ".patch_embed." in tensor:
                trees.rewrite(tree, tensor, bytes(2 * values.size))


def _hybrids(base: Path, donor: Path, out: Path, variants: dict[str, str]) -> None:
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    for name, variant in variants.items():
        trees.build(trees.plan(base, donor, out / name, trees.VARIANTS[variant]), work)
