"""Run stages of the recall proofs in parallel on every GPU, judge them, write result files.

    python3 -m proofs.recall.run TREES WORK OUT --stage recall [--stage prefixes ...]

``TREES`` is made by ``proofs.recall.trees``. A result is ``recall-STAGE.json``.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from proofs import result_files
from proofs.engine import run as engine_run
from proofs.recall import cases, judge, verdicts
from proofs.result_files import print_rows, write_result

CACHE = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
CAVEATS = [
    "not a GB10: behaviour and numerics are shown here, no Spark speed",
    "torch and triton differ from the versions this vLLM pins: graph results are the plugin's",
    "Machete and CutlassW4A8 (Hopper only) disabled, flash-attention 2 where it is not named",
    "autotuned Triton kernels take the first of their configurations, not the fastest",
    "the recall model is small (11 million weights) and trained on the language of the questions",
]


def run_cases(
    wanted: list[dict[str, Any]],
    trees: Path,
    work: Path,
    *,
    at_once: int,
    limit_s: float,
    within_s: float,
) -> dict[str, dict[str, Any]]:
    engine_run.run_cases(
        wanted, trees, work,
        at_once=at_once, limit_s=limit_s, within_s=within_s,
        module="proofs.recall.engine", resume=True,
    )  # fmt: skip
    return {case["name"]: read(case, work) for case in wanted}


def read(case: dict[str, Any], work: Path) -> dict[str, Any]:
    path, log = work / f"{case['name']}.json", work / f"{case['name']}.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    if path.exists():
        result: dict[str, Any] = json.loads(path.read_text())
    else:
        result = {"state": "died" if text else "not run", "case": case}
    telling = ("Selected ", "Using ", "cudagraph_mode=", "attention block size", "XQA", "TRTLLM")
    result["log"] = sorted(
        {
            line.split("] ", 1)[-1][:200]  # names of this machine stay out: no paths
            for line in text.splitlines()
            if any(word in line for word in telling) and "/" not in line.split("] ", 1)[-1][:200]
        }
    )[:40]
    room = CACHE.search(text)
    result["cache_tokens"] = int(room[1].replace(",", "")) if room else None
    if result["state"] in ("died", "refused"):
        result["log_tail"] = text[-2500:]
    return result


def document(
    stage: str,
    results: dict[str, dict[str, Any]],
    rows: list[dict[str, Any]],
    environment: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Engines in failed rows include their wrong answers."""
    if environment is None:
        from proofs import stages

        environment = stages.environment()
    kept = result_files.failed_engines(rows)
    return {
        "stage": f"recall-{stage}",
        **environment,
        "seed": cases.TALK_SEED,
        "caveats": CAVEATS,
        "rows": rows,
        "runs": {
            name: judge.figures(result)
            | (result_files.wrong_answers(result) if name in kept else {})
            for name, result in results.items()
        },
    }


def prove(
    stages: list[str],
    trees: Path,
    work: Path,
    out: Path,
    *,
    at_once: int = 10,
    limit_s: float = 400,
    within_s: float = float("inf"),
) -> list[dict[str, Any]]:
    """Engines with a result in ``work`` are not run again."""
    wanted = {stage: cases.STAGES[stage]() for stage in stages}
    every = {case["name"]: case for listed in wanted.values() for case in listed}
    results = run_cases(
        list(every.values()), trees, work, at_once=at_once, limit_s=limit_s, within_s=within_s
    )
    all_rows = []
    for stage, listed in wanted.items():
        own = {case["name"]: results[case["name"]] for case in listed}
        reference = read(cases.recall_cases()[0], work)
        rows = verdicts.JUDGES[stage](own, reference)
        write_result(out / f"recall-{stage}.json", document(stage, own, rows))
        all_rows += rows
    return all_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("trees", "work", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--stage", action="append", choices=list(cases.STAGES), required=True)
    arguments = parser.parse_args()
    rows = prove(arguments.stage, arguments.trees, arguments.work, arguments.out)
    print_rows(rows)
    sys.exit(any(row["passed"] is False for row in rows))


if __name__ == "__main__":
    main()
