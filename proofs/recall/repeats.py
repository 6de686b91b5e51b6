"""Check answers and tokens on busy GPUs, with and without prefix caching and drafts.

    python3 -m proofs.recall.repeats --out DIR [--seconds 240] [--engines-per-gpu 8]

Engines repeat conversations for the given time. Several engines share each GPU, because a slow GPU
makes races with the host more likely.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from proofs.engine.cases import graphs, mtp
from proofs.engine.run import visible_devices
from proofs.judges.answers import judge_engines, row
from proofs.recall import trees
from proofs.recall.cases import CACHE, FULL, NO_ASYNC, TALKING, case
from proofs.recall.judge import COUNTS
from proofs.recall.run import CAVEATS, run_cases
from proofs.result_files import print_rows, write_result

FIRST_SEED = 1_000_000
DRAFTS = mtp(2)
WAYS: dict[str, dict[str, Any]] = {
    "both": {**CACHE, **DRAFTS},
    "both-no-async": {**CACHE, **DRAFTS, **NO_ASYNC},
    "cache": CACHE,
    "drafts": DRAFTS,
    "neither": {},
}
SHARES = ("both", "both", "both", "both-no-async", "cache", "drafts", "neither", "both-no-async")
"""Settings of a GPU's engines, in order."""
WRONG_LIMIT = 0.01
"""Share of wrong answers allowed, because the model itself may fail on new conversations."""


def list_cases(gpus: int, per_gpu: int, seconds: float) -> list[dict[str, Any]]:
    """Return engines for GPUs in turn; a GPU with eight engines gets all settings."""
    return [
        case(
            f"repeat-{way}-{number}",
            options={**TALKING, **graphs(FULL), **WAYS[way]},
            repeat_s=seconds,
            seed=FIRST_SEED + 10_000 * number,
        )
        for number in range(gpus * per_gpu)
        for way in [SHARES[number // gpus % len(SHARES)]]
    ]


def judge(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for way in WAYS:
        names = [
            name
            for name, result in results.items()
            if name.rpartition("-")[0] == f"repeat-{way}" and result.get("repeated")
        ]
        runs = [results[name]["repeated"] for name in names]
        if not runs:
            continue
        suspect = [answer for run in runs for answer in run["suspect"]]
        unlikely = sum(len(answer["unlikely"]) for answer in suspect)
        numbers = {key: sum(run[key] for run in runs) for key in COUNTS}
        claim = f"{way}: tokens are the most likely of their steps, and answers are right"
        numbers |= {"engines": len(runs), "unlikely_tokens": unlikely, "suspect": suspect[:20]}
        passed = not unlikely and numbers["wrong"] <= WRONG_LIMIT * numbers["answers"]
        rows.append(row(claim, passed, names, **numbers))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--engines-per-gpu", type=int, default=8)
    chosen = parser.parse_args()
    gpus = len(visible_devices())
    cases = list_cases(gpus, chosen.engines_per_gpu, chosen.seconds)
    from proofs import stages

    with tempfile.TemporaryDirectory() as folder:
        made, work = Path(folder) / "trees", Path(folder) / "work"
        trees.make(trees.read_weights(trees.HERE), made)
        limit_s = chosen.seconds + 300
        results = run_cases(cases, made, work, len(cases), limit_s)
        rows = judge_engines(results, judge, results)
    document = {
        **stages.environment(),
        "caveats": CAVEATS,
        "engines_per_gpu": chosen.engines_per_gpu,
        "seconds": chosen.seconds,
        "rows": rows,
    }
    write_result(chosen.out / "recall-repeats.json", document)
    print_rows(rows)
    sys.exit(any(row["passed"] is False for row in rows))


if __name__ == "__main__":
    main()
