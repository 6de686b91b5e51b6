"""Result files of single checks: each adds a line, the end of the run makes one file of them.

Tests may run in several processes; a line is written at once, so none is lost or torn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proofs.result_files import read_command

ENDING = ".rows.jsonl"
KERNELS = {
    "experts": ["fused_marlin_moe"],
    "lm-head-batches": ["spark_vllm.head.kernel.logits"],
    "lm-head-nan": ["spark_vllm.head.kernel.logits"],
    "marlin-atomic-add": ["marlin_gemm (the engine's own)"],
    "turboquant-layer": ["SparkTurboQuantImpl", "TurboQuantAttentionImpl (the engine's own)"],
}
"""What a result file was computed by."""


def add(out: Path, name: str, claim: str, passed: bool, **numbers: Any) -> None:
    """Add one row to the result file ``name``."""
    out.mkdir(parents=True, exist_ok=True)
    line = {"claim": claim, "passed": passed, "cases": [], "numbers": numbers}
    print(json.dumps(line))
    with (out / f"{name}{ENDING}").open("a") as file:
        file.write(json.dumps(line) + "\n")


def merge(out: Path) -> None:
    """Make ``NAME.json`` of the lines of every ``NAME``, with versions and device."""
    from proofs import stages  # needs torch

    for path in sorted(out.glob(f"*{ENDING}")):
        name = path.name.removesuffix(ENDING)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        document = {
            "command": read_command(),
            "seed": 0,
            **stages.environment(),
            "kernels": KERNELS.get(name, []),
            "rows": sorted(rows, key=lambda row: row["claim"]),
        }
        (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
        path.unlink()
