"""Command line: `python3 -m lab.model build --out HUB [--cache DIR] [--untrained]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.errors import LabError
from lab.model import build


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; prints what was published, one commit a line."""
    parser = argparse.ArgumentParser(prog="python3 -m lab.model", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="write both repositories into a hub directory")
    make.add_argument(
        "--out", type=Path, required=True, help="hub directory: ORG/NAME/COMMIT/FILES"
    )
    make.add_argument("--cache", type=Path, help="directory of trained weights, kept by content")
    make.add_argument(
        "--untrained",
        action="store_true",
        help="random weights: same names, shapes and files, but no answers; needs no torch",
    )
    chosen = parser.parse_args(arguments)
    try:
        made = build.build(chosen.out, cache=chosen.cache, trained=not chosen.untrained)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
