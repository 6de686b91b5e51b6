"""Publishes both repositories, with trained or random weights."""

import shutil
import tempfile
from pathlib import Path

from lab.model import original, repository, vocabulary, weights
from lab.model.shape import TINY
from lab.model.spread import spread

FIRST_SEED = 1


def build(out: Path, *, trained: bool = True) -> list[str]:
    """Publish both repositories with two commits each; return the commits.

    The first INT4 commit is untrained, so that answers reveal a wrong pin.
    """
    second = weights.read(TINY) if trained else original.random_weights(TINY, FIRST_SEED + 1)
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
