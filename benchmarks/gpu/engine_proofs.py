"""Prove the plugin on real vLLM and write the rows of claim, numbers and verdict.

    python3 benchmarks/gpu/engine_proofs.py --trees DIR --work DIR --out DIR --stage eager

Needs a CUDA machine with vLLM and ``spark_vllm`` installed. Stages: ``eager`` (numbers on random
weights), ``refused`` (damaged trees), ``speculation`` (the lab's trained model), ``turboquant``
(the engine's TurboQuant backend and ours).
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "files" / "image")]

from tests.gpu import engine_cases, engine_judge, engine_run  # noqa: E402 # after the path above

CAVEATS = [
    "an H200 is not a GB10: behaviour and numerics are shown here, no Spark speed",
    "torch here differs from the version this vLLM pins: graph and compile results are the "
    "plugin's, not the shipped stack's",
    "Machete and CutlassW4A8 (Hopper only) disabled, flash-attention 2 and Triton GDN forced",
]


def environment() -> dict[str, Any]:
    """Return versions and device."""
    import importlib.metadata

    import torch

    versions = {}
    for name in ("vllm", "torch", "triton", "transformers", "numpy", "flashinfer-python"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    pinned = [
        text
        for text in importlib.metadata.requires("vllm") or []
        if text.startswith(("torch==", "flashinfer-python=="))
    ]
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "device": driver.stdout.strip(),
        "versions": versions,
        "engine_pins": pinned,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "caveats": CAVEATS,
    }


def main() -> None:
    """Run the chosen stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", action="append", required=True)
    parser.add_argument("--at-once", type=int, default=14)
    arguments = parser.parse_args()
    refused = engine_cases.refused_cases()
    cases = []
    if "eager" in arguments.stage:
        cases += engine_cases.eager_cases()
    if "refused" in arguments.stage:
        cases += [case for case, _ in refused]
    if "speculation" in arguments.stage:
        cases += engine_cases.speculation_cases()
    if "turboquant" in arguments.stage:
        cases += engine_cases.turboquant_cases()
    work, trees = arguments.work.resolve(), arguments.trees.resolve()
    # Kernels compile on first use; a few engines alone fill the caches faster than many at once.
    first = [case for case in cases if case["name"] in engine_cases.FIRST]
    rest = [case for case in cases if case not in first]
    results = engine_run.run_cases(first, trees, work, at_once=arguments.at_once)
    results |= engine_run.run_cases(rest, trees, work, at_once=arguments.at_once)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(results))
    for stage in arguments.stage:
        rows, failure = judged(stage, results, work, trees, refused)
        document = {
            "stage": stage,
            "command": f"python3 benchmarks/gpu/engine_proofs.py --stage {stage}",
            "seed": 0,
            **environment(),
            "rows": rows,
            "failure": failure,
            "runs": {
                name: {
                    "options": found["case"]["options"],
                    "tree": Path(found["case"]["tree"]).name,
                    "plugins": found["case"].get("plugins", "spark"),
                    "state": found["state"],
                    "load_s": found.get("load_s"),
                    "log": sorted({line[:200] for line in found["log_lines"]}),
                }
                for name, found in results.items()
                if "case" in found
            },
        }
        path = arguments.out / f"engine-{stage}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        for item in rows:
            print(
                {True: "PASS", False: "FAIL", None: "SEEN"}[item["passed"]],
                item["claim"],
                json.dumps(item["numbers"])[:420],
            )
        if failure:
            print("FAILURE", failure)


def judged(
    stage: str, results: Any, work: Path, trees: Path, refused: Any
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows of one stage, and why judging broke off if it did."""
    import traceback

    try:
        if stage == "eager":
            return engine_judge.judge_eager(results, work, trees), None
        if stage == "refused":
            return engine_judge.judge_refused(results, {c["name"]: t for c, t in refused}), None
        if stage == "turboquant":
            return engine_judge.judge_turboquant(results), None
        return engine_judge.judge_speculation(results), None
    except Exception:  # engines already ran: keep what they wrote
        return [], traceback.format_exc()[-1500:]


if __name__ == "__main__":
    main()
