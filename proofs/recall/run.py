"""Run stages of the recall proofs on every GPU, judge them, write ``recall-STAGE.json``."""

import json
import re
from pathlib import Path
from typing import Any

from proofs import result_files
from proofs.engine import run as engine_run
from proofs.judges.answers import judge_engines
from proofs.recall import cases, judge, verdicts
from proofs.result_files import write_result

CACHE = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
CAVEATS = [
    "not a GB10: behaviour and numerics are shown here, no Spark speed",
    "torch and triton differ from the versions this vLLM pins: graph results are the plugin's",
    "Machete and CutlassW4A8 (Hopper only) disabled, flash-attention 2 where it is not named",
    "autotuned Triton kernels take the first of their configurations, not the fastest",
    "the recall model is small (11 million weights) and trained on the language of the questions",
]


def run_cases(
    wanted: list[dict[str, Any]], trees: Path, work: Path, at_once: int, limit_s: float = 400
) -> dict[str, dict[str, Any]]:
    engine_run.run_cases(
        wanted, trees, work,
        at_once=at_once, limit_s=limit_s, module="proofs.recall.engine", resume=True,
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


def prove(stage: str, trees: Path, work: Path, out: Path, *, at_once: int) -> list[dict[str, Any]]:
    """Engines with a result in ``work`` are not run again; failed rows include wrong answers."""
    from proofs import stages

    results = run_cases(cases.STAGES[stage](), trees, work, at_once)
    reference = read(cases.recall_cases()[0], work)
    rows = judge_engines(results, verdicts.JUDGES[stage], results, reference)
    kept = result_files.failed_engines(rows)
    document = {
        "stage": f"recall-{stage}",
        **stages.environment(),
        "seed": cases.TALK_SEED,
        "caveats": CAVEATS,
        "rows": rows,
        "runs": {
            name: judge.figures(result)
            | (result_files.wrong_answers(result) if name in kept else {})
            for name, result in results.items()
        },
    }
    write_result(out / f"recall-{stage}.json", document)
    return rows
