"""Command line: `python3 -m lab.model build --out HUB [--untrained]`, and `train`."""

import argparse
import hashlib
import os
import sys
from pathlib import Path

from lab.errors import LabError
from lab.model import build, vocabulary, weights
from lab.model.shape import TINY


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lab.model", description=__doc__)
    parser.add_argument("command", choices=["build", "train"])
    parser.add_argument("--out", type=Path, help="hub directory for build")
    parser.add_argument("--untrained", action="store_true", help="build with random weights")
    chosen = parser.parse_args()
    try:
        if chosen.command == "train":
            _train()
        else:
            print("\n".join(build.build(chosen.out, trained=not chosen.untrained)))
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _train() -> None:
    # Set before torch is loaded: spinning threads are ten times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from lab.model import training

    weights.write(weights.FILE, training.train(TINY, vocabulary.train(TINY.vocabulary)))
    print(f"{weights.FILE} {hashlib.sha256(weights.FILE.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    sys.exit(main())
