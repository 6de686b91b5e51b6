"""Checkpoints of stage quality: each trained model in 16 bits, and one tree that is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lab.model import repository, vocabulary, weights
from lab.model.original import Floats
from lab.model.shape import TINY, Shape
from lab.model.spread import spread
from proofs.recall import trees as recall_trees
from proofs.recall.shape import RECALL
from proofs.trees.build import VARIANTS, build, damaged, plan, rewrite, stored_bytes

WRONG = "model.language_model.layers.1.mlp.shared_expert.down_proj.weight_scale_inv"


def make(out: Path, recall_weights: Path) -> None:
    """Write the trees of both models below ``out``; those of *tiny* but for its plain one exist."""
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    trained = spread(TINY, weights.read(TINY))
    _plain(out / "tiny-plain", TINY, trained, TINY.vocabulary)
    _wrong_scale(out / "tiny-full")
    recall = recall_trees.read_weights(recall_weights)
    _plain(out / "recall-plain", RECALL, recall, recall_trees.WORDS)
    recall_trees.move_special_tokens(out / "recall-plain/config.json")
    base, donor = recall_trees.write_sources(recall, out)
    for name, variant in VARIANTS.items():
        build(plan(base, donor, out / f"recall-{name}", variant), work)
    _wrong_scale(out / "recall-full")


def _plain(out: Path, shape: Shape, values: dict[str, Floats], words: int) -> None:
    repository.write_plain(out, shape, values, vocabulary.train(words))


def _wrong_scale(good: Path) -> None:
    """Multiply the scales of one module by four: all of them finite, and in each other's range."""
    tree = damaged(good, "wrong-scale")
    bits = np.frombuffer(stored_bytes(tree, WRONG), dtype="<u2")
    rewrite(tree, WRONG, (bits + 0x100).astype("<u2").tobytes())  # the exponent by two
