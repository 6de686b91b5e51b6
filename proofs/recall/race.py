"""Train the recall model from several seeds side by side; the first that learns to look up goes on.

    python3 -m proofs.recall.race OUT [--seeds 4] [--limit-s 400]

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
    """Wait until one has learnt, and end the others; return its directory.

    Raises:
        ValueError: None learnt.
    """
    while True:
        ended = {own: process.poll() for own, process in racing.items()}
        ahead = next((own for own, code in ended.items() if code == 0), None)
        if ahead:
            break
        if None not in ended.values():
            raise ValueError("no seed learnt; fix: give it more of them, or more time")
        time.sleep(1)
    for process in racing.values():
        if process.poll() is None:
            os.killpg(process.pid, 15)
            process.wait()
    return ahead


def main() -> None:
    """Race, and keep what the first one wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=training.LIMIT_S)
    arguments = parser.parse_args()
    own = first(start(arguments.out.resolve(), arguments.seeds, arguments.limit_s))
    for name in (weights.NAME, training.RESULT):
        shutil.copy(own / name, arguments.out)


if __name__ == "__main__":
    main()
