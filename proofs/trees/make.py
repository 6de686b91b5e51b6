"""Make every checkpoint of the proofs: ``python3 -m proofs.trees.make OUT HUB``."""

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from lab.model import repository, vocabulary, weights
from lab.model.shape import TINY
from lab.model.spread import spread
from proofs.drafts.cases import make_drafts
from proofs.recall import trees as recall_trees
from proofs.recall.trees import RECALL
from proofs.trees import damages
from proofs.trees import special as single
from proofs.trees.build import (
    VARIANTS,
    build,
    copy_trained,
    damage,
    damaged,
    plan,
    rewrite,
    stored_bytes,
    write_wide,
)


def make(out: Path, hub: Path) -> None:
    work = out / "work"
    work.mkdir(parents=True)
    with ProcessPoolExecutor(7) as pool:
        jobs = [
            pool.submit(single.make_true, out, work, name, shape, int4_mtp=int4_mtp)
            for name, shape, int4_mtp in (
                ("true-35b", single.TRUE_35B, True),
                ("true-122b", single.TRUE_122B, False),
            )
        ]
        for make_one in (single.make_steered, single.make_long, single.make_narrow, _make_wide):
            jobs.append(pool.submit(make_one, out, work))
        jobs.append(pool.submit(_make_tiny, out, work, hub))
        for job in jobs:
            job.result()


def _make_wide(out: Path, work: Path) -> None:
    _build_variants(out, work, "wide", *write_wide(out))
    trees = list(damage(out / "wide-full", out / "wide-overlay"))
    trees += damages.make_visible(out / "wide-full", out / "wide-overlay-head8")
    print("damaged:", *(tree.name for tree in trees))


def _make_tiny(out: Path, work: Path, hub: Path) -> None:
    base, donor = copy_trained(out, hub)
    _build_variants(out, work, "tiny", base, donor)
    make_drafts(out, base)
    print("damaged:", *(tree.name for tree in damages.make_plausible(out / "tiny-full-head8")))


def _build_variants(out: Path, work: Path, kind: str, base: Path, donor: Path) -> None:
    for name, variant in VARIANTS.items():
        build(plan(base, donor, out / f"{kind}-{name}", variant), work)


WRONG = "model.language_model.layers.1.mlp.shared_expert.down_proj.weight_scale_inv"


def make_quality(out: Path, recall_weights: Path) -> None:
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    trained = spread(TINY, weights.read(TINY))
    repository.write_plain(out / "tiny-plain", TINY, trained, vocabulary.train(TINY.vocabulary))
    _wrong_scale(out / "tiny-full")
    recall = recall_trees.read_weights(recall_weights)
    tokenizer = vocabulary.train(recall_trees.WORDS)
    repository.write_plain(out / "recall-plain", RECALL, recall, tokenizer)
    recall_trees.move_special_tokens(out / "recall-plain/config.json")
    base, donor = recall_trees.write_sources(recall, out)
    for name, variant in VARIANTS.items():
        build(plan(base, donor, out / f"recall-{name}", variant), work)
    _wrong_scale(out / "recall-full")


def _wrong_scale(good: Path) -> None:
    tree = damaged(good, "wrong-scale")
    bits = np.frombuffer(stored_bytes(tree, WRONG), dtype="<u2")
    rewrite(tree, WRONG, (bits + 0x100).astype("<u2").tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("hub", type=Path)
    arguments = parser.parse_args()
    make(arguments.out.resolve(), arguments.hub)


if __name__ == "__main__":
    main()
