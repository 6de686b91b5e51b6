"""Run the whole 35B and eight layers of the 122B, with random weights, and compare with the plan.

    python3 -m proofs.whole --out DIR [--work DIR]

Needs 45 GB of GPU memory and 50 GB of files: in --work, where a second call continues, else in a
temporary folder of /dev/shm if it has the space, of /tmp if not.
"""

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from proofs import stages
from proofs.engine.run import run_cases, visible_devices
from proofs.judges.answers import attempt, judge_engines, row
from proofs.result_files import describe_engines, print_rows, write_result
from proofs.trees.build import names_of
from proofs.whole import waiting
from proofs.whole.cases import case_of
from proofs.whole.trees import prepare

PLANS = Path(__file__).resolve().parents[2] / "build" / "plans" / "whole.json"
SPACE_BYTES = 50_000_000_000
WEIGHTS_LIMIT, DISK_LIMIT = 0.03, 0.01
ENGINE_LIMIT_S = 420
CAVEATS = [
    "random weights: few drafts are accepted, so steps are compared instead of tokens/s",
    "CUDA graphs without torch.compile; files in memory, read without GPUDirect",
]
Row = dict[str, Any]


def judge(engine: Row, result: Row, names: set[str]) -> list[Row]:
    name, memory, rows = engine["name"], engine["memory"], []

    def add(claim: str, passed: bool | None, **numbers: Any) -> None:
        rows.append(row(f"{name}: {claim}", passed, [name], **numbers))

    if result["state"] != "ran":
        error = str(result.get("error") or result.get("log_tail"))[-1500:]
        return [row(f"{name}: starts and decodes", False, [name], error=error)]
    add("all logits are finite", result["finite"], deviation=result["logit_deviation"])

    parts, planned = result["weight_bytes"], memory["weights_bytes"] + memory["drafter_bytes"]
    measured = sum(parts.values())
    sizes = {"planned_bytes": planned, "measured_bytes": measured, "parts_bytes": parts}
    close = abs(measured / planned - 1) < WEIGHTS_LIMIT
    add("weights take the planned memory", close, **sizes, loading=result["loading"])

    expected = {key: memory[key] for key in ("block_tokens", "full_context_users")}
    cache = {**result["cache"]}
    cache["full_context_users"] = round(cache["full_context_users"], 2)
    same = expected == {key: cache[key] for key in expected}
    add("the KV cache holds as many tokens as planned", same, planned=expected, measured=cache)

    other = result["used_bytes"] - measured - memory["kv_cache_bytes"]
    numbers = {"planned_bytes": memory["graphs_bytes"], "measured_bytes": other}
    add("memory in addition to weights and cache, after a prompt of a full step", None, **numbers)

    steps, read_bytes = result["steps"], sum(engine["read_bytes"].values())
    speeds = {key: round(read_bytes / steps[key] / 1e6) for key in ("step_ms", "gpu_ms")}
    add("decode steps", None, **steps, read_bytes=read_bytes, gb_per_s=speeds)

    if "waiting" in result:
        rows += waiting.judge(name, result["waiting"], cache["block_tokens"])
    if result["loads"]:
        read = {tensor for load in result["loads"] for tensor in load["read"]}
        language = {tensor for tensor in names if not tensor.startswith("model.visual.")}
        unread, unknown = sorted(language - read), sorted(read - language)
        claim = "target and drafter read every tensor outside the vision tower"
        numbers = {"names": len(language), "unread": unread[:20], "not_in_index": unknown[:20]}
        add(claim, not unread and not unknown, **numbers)
    return rows


def compare(model: str, engines: list[Row], results: dict[str, Row]) -> Row:
    """Compare the profiles' steps without drafts with the model's bytes and times."""
    base, v2 = (e for e in engines if e["model"] == model and not e["drafts"])
    steps = [results[engine["name"]]["steps"] for engine in (base, v2)]
    layers = base["architecture"]["layers"]
    read = [sum(engine["read_bytes"].values()) for engine in (base, v2)]
    pairs = {
        "measured_step": [step["step_ms"] for step in steps],
        "measured_gpu_time": [step["gpu_ms"] for step in steps],
        "by_bytes": read,
        "speed_model_of_a_spark": [engine["spark_step_s"] for engine in (base, v2)],
    }
    return row(
        f"{model}: a step of base over one of v2 without drafts",
        None,
        [base["name"], v2["name"]],
        **{kind: round(first / second, 4) for kind, (first, second) in pairs.items()},
        layer_us=[round(step["graphs_ms"] / layers * 1000, 2) for step in steps],
        head_us=[round(step["head_ms"] * 1000, 2) for step in steps],
    )


def prove(out: Path) -> list[Row]:
    """Run everything in a temporary folder, write the result file, return its rows."""
    in_memory = shutil.disk_usage("/dev/shm").free > SPACE_BYTES
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else "/tmp") as work:
        return prove_in(Path(work), out)


def prove_in(work: Path, out: Path) -> list[Row]:
    """Checkpoints and engines with a result in ``work`` are not made or run again."""
    engines = json.loads(PLANS.read_text())
    made = prepare(engines, work)
    cases = [case_of(engine) for engine in engines]
    results = run_cases(
        cases, work, work / "engines",
        at_once=len(visible_devices()),  # each has memory for one of these engines
        limit_s=ENGINE_LIMIT_S, module="proofs.whole.engine", resume=True,
    )  # fmt: skip
    for name, result in results.items():
        log = (work / "engines" / f"{name}.log").read_text(errors="replace")
        result["loading"] = re.findall(r"Model loading took .*?seconds", log)
    rows = judge_engines(results, judge_all, engines, results, made, work)
    environment = stages.environment()
    document = {
        **environment,
        "caveats": [*environment["caveats"], *CAVEATS],
        "rows": rows,
        "runs": describe_engines(results, []),
    }
    write_result(out / "engine-whole.json", document)
    return rows


def judge_all(
    engines: list[Row], results: dict[str, Row], made: dict[str, Row], work: Path
) -> list[Row]:
    rows = []
    for model, sizes in made.items():
        close = abs(sizes["written_bytes"] / sizes["planned_bytes"] - 1) < DISK_LIMIT
        claim = f"{model}: the builder builds v2 from a full-size base, of the planned size"
        rows.append(row(claim, close, [], **sizes))
    for engine in engines:
        names = names_of(work / case_of(engine)["tree"])
        rows += judge(engine, results[engine["name"]], names)
    return rows + [
        attempt(f"{model}: compared", compare, model, engines, results) for model in made
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path)
    chosen = parser.parse_args()
    out, work = chosen.out.resolve(), chosen.work and chosen.work.resolve()
    print_rows(prove_in(work, out) if work else prove(out))


if __name__ == "__main__":
    main()
