"""Train the recall model from several seeds in parallel; keep the first that learns to look up.

    python3 -m proofs.recall.race OUT

A network learns to look up early or hardly at all, depending on the GPU's order of additions.
Writes the files of ``proofs.recall.training`` for the first seed to ``OUT``.
"""

import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from proofs.engine.run import visible_devices
from proofs.recall import training, trees

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 4


def start(out: Path) -> dict[Path, subprocess.Popen[bytes]]:
    cards = itertools.cycle(visible_devices())
    workers = max(2, (os.cpu_count() or 1) // SEEDS - 2)
    processes = {}
    for seed in range(training.SEED, training.SEED + SEEDS):
        own = out / f"seed-{seed}"
        own.mkdir(parents=True)
        arguments = ["--seed", str(seed), "--workers", str(workers)]
        with (own / "log").open("wb") as log:
            processes[own] = subprocess.Popen(
                [sys.executable, "-m", "proofs.recall.training", str(own), *arguments],
                cwd=ROOT,
                stderr=log,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": next(cards)},
                start_new_session=True,
            )
    return processes


def wait_for_first(racing: dict[Path, subprocess.Popen[bytes]]) -> Path:
    while True:
        ended = {own: process.poll() for own, process in racing.items()}
        ahead = next((own for own, code in ended.items() if code == 0), None)
        if ahead:
            break
        if None not in ended.values():
            raise ValueError("no seed learnt; fix: raise SEEDS, or LIMIT_S in training.py")
        time.sleep(1)
    for process in racing.values():
        if process.poll() is None:
            os.killpg(process.pid, 15)
            process.wait()
    return ahead


def main() -> None:
    out = Path(sys.argv[1])
    own = wait_for_first(start(out.resolve()))
    for name in (trees.WEIGHTS, training.RESULT):
        shutil.copy(own / name, out)


if __name__ == "__main__":
    main()
