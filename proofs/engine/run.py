"""Run engine cases in parallel, each in a separate process."""

import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_cases(
    cases: list[dict[str, Any]],
    trees: Path,
    out: Path,
    *,
    at_once: int = 14,
    limit_s: float = 420,
    module: str = "proofs.engine.case",
    resume: bool = False,
) -> dict[str, dict[str, Any]]:
    """Run ``cases`` and return the result of each; without output the state is ``died``.

    ``limit_s`` is per case; ``resume`` skips cases with results in ``out``.
    """
    out.mkdir(parents=True, exist_ok=True)
    cards = itertools.cycle(visible_devices())
    jobs = {}
    with ThreadPoolExecutor(at_once) as pool:
        for case in cases:
            if resume and (out / f"{case['name']}.json").exists():
                continue
            spreads = case["options"].get("tensor_parallel_size", 1) > 1
            device = None if spreads else next(cards)
            jobs[case["name"]] = pool.submit(_run, case, trees, out, device, module, limit_s)
        return {name: job.result() for name, job in jobs.items()}


def reference_commands(trees: Path, out: Path) -> dict[str, list[str]]:
    references = {"wide": "wide-overlay", "true-35b": "true-35b", "true-122b": "true-122b"}
    module = [sys.executable, "-m", "proofs.engine.transformers_case"]
    return {
        name: [*module, str(trees / tree), str(out / f"transformers-{name}.pt")]
        + ["--pictures"] * (name == "wide")
        for name, tree in references.items()
    }


def visible_devices() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    return listed.stdout.split()


def _run(
    case: dict[str, Any], trees: Path, out: Path, device: str | None, module: str, limit_s: float
) -> dict[str, Any]:
    path = out / f"{case['name']}.case.json"
    options = dict(case.get("options", {}))
    draft = options.get("speculative_config", {})
    if "model" in draft:
        options["speculative_config"] = {**draft, "model": str(trees / draft["model"])}
    path.write_text(json.dumps({**case, "options": options, "tree": str(trees / case["tree"])}))
    visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **visible}
    command = [sys.executable, "-m", module, str(path), str(out)]
    started, late = time.monotonic(), False
    with (out / f"{case['name']}.log").open("wb") as log:
        try:
            subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=log, env=environment, timeout=limit_s,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            late = True
    result = read_result(case, out, late)
    seconds = time.monotonic() - started
    print(f"phase=case name={case['name']} state={result['state']} s={seconds:.0f}", flush=True)
    print(result["log_tail"], end="", flush=True)
    return result


def read_result(case: dict[str, Any], out: Path, late: bool) -> dict[str, Any]:
    path = out / f"{case['name']}.json"
    log = (out / f"{case['name']}.log").read_text(errors="replace")
    result = (
        json.loads(path.read_text()) if path.exists() else {"state": "late" if late else "died"}
    )
    result["log_lines"] = [
        line.split("] ", 1)[-1]
        for line in log.splitlines()
        if "cache directory" not in line  # names of this machine
        and any(text in line for text in ("Selected ", "Using ", "spark", "cudagraph_mode="))
    ][:60]
    result["log_tail"] = log[-1500:] if result["state"] in ("late", "died") else ""
    return result
