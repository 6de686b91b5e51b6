"""Prove the plugin on real vLLM and write the rows of claim, numbers and verdict.

    python3 benchmarks/gpu/engine_proofs.py --trees DIR --work DIR --out DIR --stage eager

Needs a CUDA machine with vLLM and ``spark_vllm`` installed. Stages: ``eager`` (numbers on random
weights), ``refused`` (damaged trees), ``speculation`` (the lab's trained model), ``turboquant``
(the engine's TurboQuant backend and ours); with trees made with ``--special`` also ``nan``,
``profiles``, ``steered``, ``prefixes``, ``sizes``, ``long``, ``head-choice`` and ``two-gpus``
(see ``tests/gpu/profile_cases.py``).
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

from tests.gpu import (  # noqa: E402 # after the path above
    engine_cases,
    engine_judge,
    engine_run,
    profile_cases,
    profile_judge,
)

REFUSALS = {"refused": engine_cases.refused_cases, "nan": engine_cases.nan_cases}
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
    parser.add_argument("--only", help="names of engines, with commas; the others are not run")
    parser.add_argument(
        "--within", type=float, default=float("inf"), help="seconds for all engines"
    )
    arguments = parser.parse_args()
    only = arguments.only.split(",") if arguments.only else None
    cases = [case for stage in arguments.stage for case in cases_of(stage)]
    cases = [case for case in cases if only is None or case["name"] in only]
    work, trees = arguments.work.resolve(), arguments.trees.resolve()
    # Kernels compile on first use; a few engines alone fill the caches faster than many at once.
    first = [case for case in cases if case["name"] in engine_cases.FIRST]
    rest = [case for case in cases if case not in first]
    beside = start_transformers(trees, work) if "sizes" in arguments.stage else []
    many = {"at_once": arguments.at_once, "within_s": arguments.within}
    results = engine_run.run_cases(first, trees, work, **many) if first else {}
    results |= engine_run.run_cases(rest, trees, work, **many)
    for process in beside:
        process.wait()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(results))
    for stage in arguments.stage:
        rows, failure = judged(stage, results, work, trees)
        own = {case["name"] for case in cases_of(stage)}
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
                if "case" in found and name in own
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


def cases_of(stage: str) -> list[dict[str, Any]]:
    """Return the engine runs of one stage."""
    if stage in REFUSALS:
        return [case for case, _ in REFUSALS[stage]()]
    return {
        "eager": engine_cases.eager_cases,
        "speculation": engine_cases.speculation_cases,
        "turboquant": engine_cases.turboquant_cases,
        "profiles": profile_cases.profile_cases,
        "steered": profile_cases.steered_cases,
        "sizes": profile_cases.sizes_cases,
        "long": profile_cases.long_cases,
        "prefixes": profile_cases.prefix_cases,
        "two-gpus": profile_cases.two_gpu_cases,
        "head-choice": profile_cases.head_cases,
    }[stage]()


def start_transformers(trees: Path, work: Path) -> list[subprocess.Popen[bytes]]:
    """Start the other implementation on the trees of stage ``sizes``."""
    work.mkdir(parents=True, exist_ok=True)
    started = []
    for name, tree in (("wide", "wide-overlay"), ("true-35b", None), ("true-122b", None)):
        out = work / f"transformers-{name}.pt"
        command = [sys.executable, "-m", "tests.gpu.transformers_case", str(trees / (tree or name))]
        more = ["--pictures"] if name == "wide" else []
        with out.with_suffix(".log").open("wb") as log:
            started.append(
                subprocess.Popen([*command, str(out), *more], stdout=log, stderr=log, cwd=ROOT)
            )
    return started


def judged(
    stage: str, results: Any, work: Path, trees: Path
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows of one stage, and why judging broke off if it did."""
    import traceback

    judges = {
        "eager": lambda: engine_judge.judge_eager(results, work, trees),
        "turboquant": lambda: engine_judge.judge_turboquant(results),
        "speculation": lambda: engine_judge.judge_speculation(results),
        "profiles": lambda: profile_judge.judge_profiles(results),
        "steered": lambda: profile_judge.judge_steered(results, profile_cases.steered_cases()),
        "two-gpus": lambda: profile_judge.judge_steered(results, profile_cases.two_gpu_cases()),
        "prefixes": lambda: profile_judge.judge_prefixes(results),
        "head-choice": lambda: profile_judge.judge_heads(results, profile_cases.head_cases()),
        "sizes": lambda: profile_judge.judge_sizes(results, work, trees),
        "long": lambda: profile_judge.judge_long(results),
    }
    try:
        if stage in REFUSALS:
            wanted = {case["name"]: text for case, text in REFUSALS[stage]()}
            return engine_judge.judge_refused(results, wanted), None
        return judges[stage](), None
    except Exception:  # engines already ran: keep what they wrote
        return [], traceback.format_exc()[-1500:]


if __name__ == "__main__":
    main()
