"""``python3 -m lab.engine build``: make the engine's pieces; ``run ARGS``: run its Python."""

import json
import sys

from lab.engine.build import build_engine
from lab.engine.inside import enter
from lab.errors import LabError
from lab.paths import lab_paths


def main(argv: list[str]) -> int:
    try:
        engine = build_engine(lab_paths().cache)
        if argv[:1] == ["run"]:
            enter(engine.rootfs, engine.venv, argv[1:])
        print(json.dumps({"rootfs": str(engine.rootfs), "venv": str(engine.venv)}))
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
