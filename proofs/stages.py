"""Run the stages of the engine proofs, judge them, write result files.

    python3 -m proofs.stages --trees DIR --work DIR --out DIR --stage eager

Needs a CUDA machine with vLLM and ``spark_vllm``; ``make gpu`` runs the same as tests.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proofs import result_files
from proofs.engine import cases as engine_cases
from proofs.engine import profile_cases, quick
from proofs.engine import run as engine_run
from proofs.judges import engine as engine_judge
from proofs.judges import profiles as profile_judge
from proofs.judges.answers import attempt, judge_engines
from proofs.judges.damages import judge_damages
from proofs.judges.quality import judge_quality
from proofs.judges.talks import judge_conversations
from proofs.result_files import ENDING, describe_run, write_result

ROOT = Path(__file__).resolve().parents[1]
Rows = list[dict[str, Any]]
CASES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "eager": engine_cases.eager_cases,
    "refused": lambda: [case for case, _ in engine_cases.refused_cases()],
    "nan": lambda: [case for case, _ in engine_cases.nan_cases()],
    "damages": engine_cases.damage_cases,
    "speculation": engine_cases.speculation_cases,
    "turboquant": engine_cases.turboquant_cases,
    "profiles": profile_cases.profile_cases,
    "steered": profile_cases.steered_cases,
    "sizes": profile_cases.sizes_cases,
    "names": profile_cases.names_cases,
    "long": profile_cases.long_cases,
    "prefixes": profile_cases.conversation_cases,
    "two-gpus": profile_cases.two_gpu_cases,
    "head-choice": profile_cases.head_cases,
    "quality": profile_cases.quality_cases,
}
CAVEATS = [
    "not a GB10: behaviour and numerics are shown here, no Spark speed",
    "torch here differs from the version this vLLM pins: graph and compile results are the "
    "plugin's, not the shipped stack's",
    "Machete and CutlassW4A8 (Hopper only) disabled, flash-attention 2 (where no other is named) "
    "and Triton GDN forced",
]

KERNELS = {
    "experts": ["fused_marlin_moe"],
    "lm-head-batches": ["spark_vllm.head.kernel.logits"],
    "lm-head-nan": ["spark_vllm.head.kernel.logits"],
    "needles": [
        "SparkTurboQuantImpl.do_kv_cache_update (the engine's own store kernel)",
        "TritonAttentionImpl (the engine's own)",
    ],
    "marlin-atomic-add": ["marlin_gemm (the engine's own)"],
    "turboquant-layer": ["SparkTurboQuantImpl", "TurboQuantAttentionImpl (the engine's own)"],
}


def prove(
    stage: str,
    trees: Path,
    work: Path,
    out: Path,
    *,
    at_once: int,
    only: list[str] | None = None,
    result: str | None = None,
) -> Rows:
    """Run the engines of a stage, judge them, write ``engine-STAGE.json``; returns the rows.

    ``only`` lists names of engines to run; ``result`` replaces the stage in the file name.
    """
    cases = [case for case in CASES[stage]() if only is None or case["name"] in only]
    references = []
    if stage == "sizes":
        work.mkdir(parents=True, exist_ok=True)
        for name, command in engine_run.reference_commands(trees, work).items():
            with (work / f"transformers-{name}.log").open("wb") as log:
                references.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT))
    results: dict[str, dict[str, Any]] = {}
    for wave in _waves(cases):
        results |= engine_run.run_cases(wave, trees, work, at_once=at_once)
    for process in references:
        process.wait()

    def judge() -> Rows:
        rows = judge_stage(stage, results, work, trees)
        return [
            row for row in rows if only is None or {*result_files.engines_of(row)} <= {*results}
        ]

    rows = judge_engines(results, judge)
    document = {
        "stage": stage,
        **environment(),
        "seed": 0,
        "rows": rows,
        "runs": result_files.describe_engines(results, rows),
    }
    write_result(out / f"engine-{result or stage}.json", document)
    return rows


def _waves(cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the cases in groups that run one after another.

    A few engines first compile the kernels. Cases marked ``later`` need files of earlier cases.
    """
    alone = () if quick.is_enabled() else engine_cases.FIRST
    first = [case for case in cases if case["name"] in alone]
    later = [case for case in cases if case.get("later")]
    rest = [case for case in cases if case not in first and case not in later]
    return [wave for wave in (first, rest, later) if wave]


def judge_stage(stage: str, results: dict[str, Any], work: Path, trees: Path) -> Rows:
    refusals = {"refused": engine_cases.refused_cases, "nan": engine_cases.nan_cases}
    judges: dict[str, Callable[[], Rows]] = {
        "eager": lambda: engine_judge.judge_eager(results, work, trees),
        "damages": lambda: judge_damages(results, trees),
        "turboquant": lambda: engine_judge.judge_turboquant(results),
        "speculation": lambda: engine_judge.judge_speculation(results),
        "profiles": lambda: profile_judge.judge_profiles(results),
        "steered": lambda: profile_judge.judge_steered(results, CASES[stage]()),
        "two-gpus": lambda: profile_judge.judge_steered(results, CASES[stage]()),
        "prefixes": lambda: [
            *judge_conversations(results),
            *profile_judge.judge_prefixes(results, ("prefixes-eager", "prefixes-full")),
        ],
        "head-choice": lambda: profile_judge.judge_heads(results, CASES[stage]()),
        "sizes": lambda: profile_judge.judge_sizes(results, work, trees),
        "names": lambda: [
            attempt(case["name"], profile_judge.judge_tensor_reads, results, case, trees)
            for case in CASES[stage]()
        ],
        "long": lambda: profile_judge.judge_long(results),
        "quality": lambda: judge_quality(results, work),
    }
    if stage in refusals:
        wanted = {case["name"]: text for case, text in refusals[stage]()}
        return engine_judge.judge_refused(results, wanted)
    return judges[stage]()


def environment() -> dict[str, Any]:
    import torch

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    run = describe_run(
        driver.stdout.strip(),
        *("vllm", "torch", "triton", "transformers", "numpy", "flashinfer-python"),
    )
    needs = (importlib.metadata.requires("vllm") or []) if run["versions"]["vllm"] else []
    pinned = [text for text in needs if text.startswith(("torch==", "flashinfer-python=="))]
    return {
        **run,
        "engine_pins": pinned,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "caveats": [*CAVEATS, *quick.caveats()],
    }


def merge_rows(out: Path) -> None:
    for path in sorted(out.glob(f"*{ENDING}")):
        name = path.name.removesuffix(ENDING)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        document = {
            **environment(),
            "seed": 0,
            "kernels": KERNELS.get(name, []),
            "rows": sorted(rows, key=lambda row: row["claim"]),
        }
        write_result(out / f"{name}.json", document)
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("trees", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--stage", required=True, choices=sorted(CASES))
    parser.add_argument("--result", help="name the file engine-RESULT.json")
    parser.add_argument("--at-once", type=int, default=14)
    parser.add_argument("--only", nargs="*", help="names of engines to run")
    prove(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
