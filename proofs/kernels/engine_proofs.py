"""Prove the plugin on real vLLM and write the rows of claim, numbers and verdict.

    python3 proofs/kernels/engine_proofs.py --trees DIR --work DIR --out DIR --stage eager

Needs a CUDA machine with vLLM and ``spark_vllm`` installed. Stages: ``eager`` (numbers on random
weights), ``refused`` (damaged trees), ``speculation`` (the lab's trained model), ``turboquant``
(the engine's TurboQuant backend and ours); with trees made with ``--special`` also ``nan``,
``profiles``, ``steered``, ``prefixes``, ``sizes``, ``names``, ``long``, ``head-choice`` and
``two-gpus`` (see ``proofs/engine/profile_cases.py``). ``make gpu`` runs the same as tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "files" / "image")]

from proofs import stages  # noqa: E402 # after the path above


def main() -> None:
    """Run the chosen stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", action="append", required=True, choices=sorted(stages.CASES))
    parser.add_argument(
        "--result", help="of one stage: name of its result file, engine-RESULT.json"
    )
    parser.add_argument("--at-once", type=int, default=14)
    parser.add_argument("--only", help="names of engines, with commas; the others are not run")
    parser.add_argument(
        "--within", type=float, default=float("inf"), help="seconds for all engines"
    )
    arguments = parser.parse_args()
    rows = stages.prove(
        arguments.stage,
        arguments.trees.resolve(),
        arguments.work.resolve(),
        arguments.out,
        at_once=arguments.at_once,
        within_s=arguments.within,
        only=arguments.only.split(",") if arguments.only else None,
        result=arguments.result,
    )
    for row in rows:
        word = {True: "PASS", False: "FAIL", None: "SEEN"}[row["passed"]]
        print(word, row["claim"], json.dumps(row["numbers"])[:420])


if __name__ == "__main__":
    main()
