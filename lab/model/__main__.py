"""Command line: `python3 -m lab.model build --out HUB [--untrained]`, and `train`."""

import argparse
import hashlib
import os
import sys
from pathlib import Path

from lab.errors import LabError
from lab.model import build, vocabulary, weights
from lab.model.shape import TINY


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lab.model", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="write both repositories into a hub directory")
    make.add_argument(
        "--out", type=Path, required=True, help="hub directory: ORG/NAME/COMMIT/FILES"
    )
    make.add_argument(
        "--untrained",
        action="store_true",
        help="random weights: same names, shapes and files, but no answers",
    )
    train = commands.add_parser("train", help="train the weights (minutes; needs torch)")
    train.add_argument("--out", type=Path, default=weights.FILE, help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "train":
            return _train(chosen.out)
        made = build.build(chosen.out, trained=not chosen.untrained)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(made))
    return 0


def _train(out: Path) -> int:
    # Set before torch is loaded: spinning threads are ten times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from lab.model import training

    weights.write(out, training.train(TINY, vocabulary.train(TINY.vocabulary)))
    print(f"{out} {hashlib.sha256(out.read_bytes()).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
