"""Run engine cases in parallel, each in a separate process."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from proofs.engine.gpu_memory import needed_gib, reserve

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

    ``limit_s`` is per case; ``resume`` skips cases that ran with results in ``out``.
    """
    out.mkdir(parents=True, exist_ok=True)
    devices = visible_devices()
    cards = itertools.cycle(devices)
    # torch would start a thread per core in every engine
    cores = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    shared = {"OMP_NUM_THREADS": str(max(1, cores // at_once))}
    jobs = {}
    with ThreadPoolExecutor(at_once) as pool:
        for case in cases:
            if resume and _has_run(out / f"{case['name']}.json"):
                jobs[case["name"]] = pool.submit(read_result, case, out, late=False)
                continue
            size = case["options"].get("tensor_parallel_size", 1)
            own = devices[:size] if size > 1 else [next(cards)]
            jobs[case["name"]] = pool.submit(_run, case, trees, out, own, module, limit_s, shared)
        return {name: job.result() for name, job in jobs.items()}


def _has_run(path: Path) -> bool:
    return path.exists() and bool(json.loads(path.read_text())["state"] == "ran")


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
    case: dict[str, Any],
    trees: Path,
    out: Path,
    devices: list[str],
    module: str,
    limit_s: float,
    shared: dict[str, str],
) -> dict[str, Any]:
    (out / f"{case['name']}.json").unlink(missing_ok=True)
    path = out / f"{case['name']}.case.json"
    options = dict(case.get("options", {}))
    draft = options.get("speculative_config", {})
    if "model" in draft:
        options["speculative_config"] = {**draft, "model": str(trees / draft["model"])}
    path.write_text(json.dumps({**case, "options": options, "tree": str(trees / case["tree"])}))
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    environment = {**os.environ, **shared, "PYTHONUNBUFFERED": "1", **visible}
    command = [sys.executable, "-m", module, str(path), str(out)]
    with ExitStack() as stack:
        for device in devices:  # in order: two engines never wait for each other
            stack.enter_context(reserve(device, needed_gib(options, trees / case["tree"])))
        log = stack.enter_context((out / f"{case['name']}.log").open("wb"))
        started, late = time.monotonic(), False
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:  # workers of a failed engine would keep GPU memory
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result = read_result(case, out, late)
    seconds = time.monotonic() - started
    print(f"phase=case name={case['name']} state={result['state']} s={seconds:.0f}", flush=True)
    print(result["log_tail"], end="", flush=True)
    return result


def read_result(case: dict[str, Any], out: Path, late: bool) -> dict[str, Any]:
    path = out / f"{case['name']}.json"
    log = (out / f"{case['name']}.log").read_text(errors="replace")
    ended = {"case": case, "state": "late" if late else "died"}
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else ended
    result["log_lines"] = [
        line.split("] ", 1)[-1]
        for line in log.splitlines()
        if "cache directory" not in line  # names of this machine
        and any(text in line for text in ("Selected ", "Using ", "spark", "cudagraph_mode="))
    ][:60]
    result["log_tail"] = log[-1500:] if result["state"] in ("late", "died") else ""
    return result
