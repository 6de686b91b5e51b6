"""Train the recall model from several seeds side by side; the first that learns to look up goes on.

    python3 -m proofs.recall.race OUT [--seeds 4] [--limit-s 600]

A network learns to look things up at once or hardly at all, by the order in which a card adds.
Writes into ``OUT`` what ``proofs.recall.training`` writes of the seed that was first.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from proofs.engine.run import devices_shown
from proofs.recall import training, weights

ROOT = Path(__file__).resolve().parents[2]


def start(out: Path, seeds: int, limit_s: float) -> dict[Path, subprocess.Popen[bytes]]:
    """Start one training per seed, in turn on every card; return them by their directories."""
    cards = itertools.cycle(devices_shown())
    workers = max(2, (os.cpu_count() or 1) // seeds - 2)
    begun = {}
    for seed in range(training.SEED, training.SEED + seeds):
        own = out / f"seed-{seed}"
        own.mkdir(parents=True)
        words = ["--seed", str(seed), "--limit-s", str(limit_s), "--workers", str(workers)]
        with (own / "log").open("wb") as log:
            begun[own] = subprocess.Popen(
                [sys.executable, "-m", "proofs.recall.training", str(own), *words],
                cwd=ROOT,
                stderr=log,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": next(cards)},
                start_new_session=True,  # so that its workers end with it
            )
    return begun


def first(racing: dict[Path, subprocess.Popen[bytes]]) -> Path:
    """Wait until one has learnt, end the others, and wait for it; return its directory.

    Raises:
        ValueError: None learnt, or the one that did failed afterwards.
    """
    while any(process.poll() is None for process in racing.values()):
        ahead = next((own for own in racing if (own / training.LEARNT).exists()), None)
        if ahead:
            for own, process in racing.items():
                if own != ahead and process.poll() is None:
                    os.killpg(process.pid, 15)
                    process.wait()
            if racing[ahead].wait() == 0:
                return ahead
            raise ValueError(f"{ahead.name} learnt and then failed; see {ahead / 'log'}")
        time.sleep(1)
    raise ValueError("no seed learnt; fix: give it more of them, or more time")


def main() -> None:
    """Race, and keep what the first one wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=600)
    arguments = parser.parse_args()
    own = first(start(arguments.out.resolve(), arguments.seeds, arguments.limit_s))
    for name in (weights.NAME, training.RESULT):
        shutil.copy(own / name, arguments.out)


if __name__ == "__main__":
    main()
