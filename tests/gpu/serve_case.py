"""Serve a tree over HTTP exactly as a profile would, and ask it things.

    python3 -m tests.gpu.serve_case TREE OUT.json PLAN.json [--pictures]

PLAN.json is a plan as ``tests/unit/plan/golden`` holds it: arguments and environment of the engine
come from there. What this machine lacks or a tiny model cannot use is replaced and listed in the
result. ``--pictures`` keeps the vision tower, as a profile with ``vision: true`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu import serve_talk
from tests.gpu.engine_case import ENVIRONMENT

REPLACED = {"--max-model-len": "4096", "--gpu-memory-utilization": "0.05"}
ADDED = {
    # No profiling run: other engines on the same card would disturb it.
    "--kv-cache-memory-bytes": str(1 << 30),
    "--additional-config": '{"gdn_prefill_backend": "triton"}',
}
FLASH2 = {"--attention-config": '{"flash_attn_version": 2}'}  # TurboQuant has its own
START_LIMIT_S = 420


def adapted(
    argv: list[str], tree: str, sock: str, *, pictures: bool
) -> tuple[list[str], list[str]]:
    """Return the arguments for this machine, and what was changed."""
    changed = []
    result = [tree, *argv[1:]]
    for option, value in {**REPLACED, "--uds": sock}.items():
        if option in result:
            place = result.index(option) + 1
            changed.append(f"{option}: {result[place]} -> {value}")
            result[place] = value
    if pictures:
        result.remove("--language-model-only")
        changed.append("without --language-model-only, as vision: true renders it")
    added = dict(ADDED) if "turboquant" in " ".join(argv) else {**ADDED, **FLASH2}
    for option, value in added.items():
        if option in result:
            place = result.index(option) + 1
            value = json.dumps({**json.loads(result[place]), **json.loads(value)})
            result[place] = value
        else:
            result += [option, value]
        changed.append(f"added {option} {value}")
    return result, changed


def wait_until_healthy(sock: str, server: subprocess.Popen[bytes]) -> float | None:
    """Return the seconds it took; ``None`` when the server ended or the time was up."""
    started = time.monotonic()
    while time.monotonic() - started < START_LIMIT_S and server.poll() is None:
        try:
            if serve_talk.ask(sock, "GET", "/health")[0] == 200:
                return round(time.monotonic() - started, 1)
        except OSError:
            time.sleep(1)
    return None


def serve(plan: dict[str, Any], tree: str, log_path: Path, *, pictures: bool) -> dict[str, Any]:
    """Start, talk, stop; return what happened."""
    engine = plan["serve"]["release"]["engine"]
    sock = f"/tmp/spark-engine-{os.getpid()}.sock"
    arguments, changed = adapted(engine["argv"], tree, sock, pictures=pictures)
    # An image without our plugin has none to load.
    plugins = engine["env"].get("VLLM_PLUGINS", "")
    environment = {**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": plugins}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
    with log_path.open("wb") as log:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    result: dict[str, Any] = {"argv": arguments, "changed": changed, "plugins": plugins}
    result["state"] = "died"
    try:
        result["healthy_s"] = wait_until_healthy(sock, server)
        if result["healthy_s"] is not None:
            result["state"] = "talking"
            result.update(serve_talk.talk(sock, plan["serve"]["names"][0], pictures=pictures))
            result["state"] = "served"
    except (KeyError, ValueError, OSError) as error:
        result["error"] = repr(error)
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
    return result


def main() -> None:
    """Serve, and write the result file with rows of claim, numbers and verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree")
    parser.add_argument("out", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--pictures", action="store_true")
    arguments = parser.parse_args()
    from benchmarks.gpu.engine_proofs import environment

    log_path = arguments.out.with_suffix(".log")
    plan = json.loads(arguments.plan.read_text())
    result = serve(plan, arguments.tree, log_path, pictures=arguments.pictures)
    lines = log_path.read_text(errors="replace").splitlines()
    wanted = ("Selected ", "spark", "Using ", "cudagraph", "KV cache size", "Model Runner")
    found = {line.split("] ", 1)[-1][:200] for line in lines if any(t in line for t in wanted)}
    result["log"] = sorted(line for line in found if "cache directory" not in line)
    result["log_tail"] = [] if result["state"] == "served" else lines[-25:]
    document = {
        "command": f"python3 -m tests.gpu.serve_case TREE OUT {arguments.plan.name}"
        + (" --pictures" if arguments.pictures else ""),
        "tree": Path(arguments.tree).name,
        "seed": 0,
        **environment(),
        "rows": serve_talk.judge(result, plan["serve"]["profile"], pictures=arguments.pictures),
        **result,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in document["rows"]:
        print("PASS" if row["passed"] else "FAIL", row["claim"], json.dumps(row["numbers"])[:400])
    print(result["state"], result.get("error", ""), *result["log_tail"][-6:], sep="\n")


if __name__ == "__main__":
    main()
