"""Run the stages of the proofs of Qwen4Exp, judge them, write result files."""

from collections.abc import Callable
from pathlib import Path

from proofs.engine import run as engine_run
from proofs.engine.quick import caveats
from proofs.flash import run, talks
from proofs.flash.run import Results, Row
from proofs.judges.answers import judge_engines
from proofs.result_files import describe_engines, write_result

CAVEATS = [
    "not a GB10: behaviour and numerics are shown here, no Spark speed",
    "torch and triton differ from the versions this vLLM pins",
    "mixers of up to 16 tokens use the unfused path where CuTe DSL is missing",
    "the model is small and constructed, not trained",
]
FIRST = ("file-full-mtp3", "stock-nvfp4", "stock-tp2")
"""They compile the kernels."""
Judge = Callable[[Results, Path, Path], list[Row]]
STAGES: dict[str, tuple[Callable[[], list[Row]], Judge, Callable[[Path], None]]] = {
    "flash-next": (run.cases, run.judge_all, run.make_damaged),
    "flash-next-tp2": (run.two_gpu_cases, run.judge_two_gpus, run.make_damaged),
    "flash-next-sampling": (talks.sampling_cases, talks.judge_sampling, lambda _: None),
    "flash-next-prefixes": (talks.prefix_cases, talks.judge_prefixes, talks.make_talk_trees),
}


def prove(stage: str, trees: Path, work: Path, out: Path) -> list[Row]:
    """Run all engines of a stage, judge them, write ``engine-STAGE.json``; return the rows."""
    from proofs.stages import environment

    list_cases, judge, make_trees = STAGES[stage]
    make_trees(trees)
    listed = list_cases()
    first = [entry for entry in listed if entry["name"] in FIRST]
    rest = [entry for entry in listed if entry not in first]
    results: Results = {}
    for wave in (first, rest):
        results |= engine_run.run_cases(
            wave, trees, work, at_once=12, limit_s=400, module="proofs.flash.engine"
        )
    results = {entry["name"]: results[entry["name"]] for entry in listed}
    rows = judge_engines(results, judge, results, work, trees)
    engines = describe_engines(results, rows)
    document = {"stage": stage, **environment(), "caveats": [*CAVEATS, *caveats()], "rows": rows}
    write_result(out / f"engine-{stage}.json", {**document, "engines": engines})
    return rows
