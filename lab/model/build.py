"""Makes the weights, or takes them from the cache, and publishes both repositories."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from lab.model import lessons, original, repository, vocabulary
from lab.model.original import Floats
from lab.model.shape import TINY
from lab.model.spread import spread

TRAINING_FILES = (  # whatever of ours decides the trained weights
    "chat_template.jinja",
    "facts.json",
    "lessons.py",
    "original.py",
    "shape.py",
    "training.py",
    "network.py",
    "vocabulary.py",
)
FIRST_SEED = 1


def cache_key() -> str:
    """Names the trained weights by what they follow from."""
    digest = hashlib.sha256()
    for name in TRAINING_FILES:
        path = lessons.HERE / name
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def trained_weights(cache: Path | None) -> dict[str, Floats]:
    """The trained model, from the cache when it is there."""
    kept = cache / f"lab-tiny-{cache_key()}.npz" if cache else None
    if kept and kept.exists():
        with np.load(kept) as stored:
            return {name: stored[name] for name in stored.files}
    # Before torch is loaded: threads that spin while they wait cost tenfold on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from lab.model import training  # not above: an untrained build does without torch

    weights: dict[str, Floats] = training.train(TINY, vocabulary.train(TINY.vocabulary))
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".part")
        with part.open("wb") as out:
            np.savez(out, allow_pickle=False, **weights)
        part.rename(kept)
    return weights


def build(out: Path, *, cache: Path | None = None, trained: bool = True) -> list[str]:
    """Publishes both repositories, two commits each, and says which.

    The INT4 base was first uploaded untrained, so that a wrong pin is noticed by its answers. The
    FP8 donor's second commit changes the README only, so that a pin on either gives equal weights.
    """
    second = trained_weights(cache) if trained else original.random_weights(TINY, FIRST_SEED + 1)
    first, second = spread(TINY, original.random_weights(TINY, FIRST_SEED)), spread(TINY, second)
    tokenizer = vocabulary.train(TINY.vocabulary)
    state = "trained" if trained else "untrained"
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".build-", dir=out))
    try:
        base = [work / "int4-1", work / "int4-2"]
        repository.write_int4(base[0], TINY, first, tokenizer, "First upload: plain rounding.")
        repository.write_int4(base[1], TINY, second, tokenizer, f"Tuned version ({state}).")
        donor = [work / "fp8-1", work / "fp8-2"]
        repository.write_fp8(donor[0], TINY, second, tokenizer, f"FP8 ({state}).")
        shutil.copytree(donor[0], donor[1])
        with (donor[1] / "README.md").open("a") as readme:
            readme.write("\nBlocks of 128 x 128, dynamic activations.\n")
        lines: list[str] = []
        for name, trees in ((repository.INT4_NAME, base), (repository.FP8_NAME, donor)):
            commits = repository.publish(out, name, trees)
            lines.extend(f"{name} {commit}" for commit in commits)
        return lines
    finally:
        shutil.rmtree(work)
