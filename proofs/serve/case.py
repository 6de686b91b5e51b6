"""Serve a checkpoint over HTTP with the arguments of a profile, and test the answers.

The result lists replacements for this machine and a tiny model.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from spark_contract import documents
from spark_contract.release import Release
from spark_host.engine.client import Engine, EngineError

from proofs import stages
from proofs.engine import quick
from proofs.judges.answers import row
from proofs.releases import asking
from proofs.releases.server import MACHINE, Server
from proofs.result_files import write_result
from proofs.serve import long as serve_long
from proofs.serve import talk as serve_talk

REPLACED = {"--max-model-len": "4096", "--gpu-memory-utilization": "0.05"}
CACHE_DIRECTORY = "/tmp/spark-serve-cache"
"""Shared by all profiles, which compile the same kernels."""
CACHE = "--kv-cache-memory-bytes"
CACHE_BYTES = 1 << 30
"""Without a profiling run: other engines on the same card would disturb it."""
START_LIMIT_S = 420


def adapt_arguments(
    argv: list[str], tree: str, sock: str, kind: str
) -> tuple[list[str], list[str]]:
    changed = []
    result = [tree, *(word.replace('"/cache/', f'"{CACHE_DIRECTORY}/') for word in argv[1:])]
    replaced = {**REPLACED, "--uds": sock}
    if kind == "long":
        replaced.pop("--max-model-len")
    for option, value in replaced.items():
        if option in result:
            place = result.index(option) + 1
            changed.append(f"{option}: {result[place]} -> {value}")
            result[place] = value
    if kind == "pictures":
        result.remove("--language-model-only")
        changed.append("without --language-model-only, as vision: true renders it")
    added = {CACHE: str(serve_long.CACHE_BYTES if kind == "long" else CACHE_BYTES)}
    if "turboquant" not in " ".join(argv):  # it chooses by itself
        added["--attention-config"] = json.dumps({"flash_attn_version": quick.flash_attention()})
    for option, value in added.items():
        result += [option, value]
        changed.append(f"added {option} {value}")
    return result, changed


def adapt_environment(planned: dict[str, str]) -> dict[str, str]:
    moved = {name: value.replace("/cache", CACHE_DIRECTORY, 1) for name, value in planned.items()}
    # Without the variable vLLM loads every plugin; the release's image has none to load.
    return {"VLLM_PLUGINS": "", **moved, **MACHINE}


def start(plan: dict[str, Any], tree: str, log: Path, kind: str) -> Server:
    engine = plan["serve"]["engine"]
    socket = Path(f"/tmp/spark-engine-{log.stem}-{os.getpid()}.sock")
    argv, changed = adapt_arguments(engine["argv"], tree, str(socket), kind)
    server = Server(log, socket, argv, {**os.environ, **adapt_environment(engine["env"])}, changed)
    server.start(apart=False)
    return server


def serve(plan: dict[str, Any], tree: str, log: Path, kind: str) -> dict[str, Any]:
    release = documents.read(Release, plan["serve"])
    server = start(plan, tree, log, kind)
    result: dict[str, Any] = {
        "argv": server.argv,
        "changed": server.changed,
        "env": release.engine.env,
        "env_changed": [f"/cache -> {CACHE_DIRECTORY}", *(f"{k}={v}" for k, v in MACHINE.items())],
        "state": "died",
    }
    try:
        result["healthy_s"] = server.healthy(START_LIMIT_S)
        if result["healthy_s"] is not None:
            result["state"] = "talking"
            engine, name = Engine(server.socket), release.names[0]
            if kind == "long":
                result.update(serve_long.talk(engine, name))
            else:
                result.update(serve_talk.talk(engine, name, pictures=kind == "pictures"))
                result["sampled"] = asking.run_check(server, release, "sampled")
            result["state"] = "served"
    except (EngineError, KeyError, ValueError, OSError) as error:
        result["error"] = repr(error)
    finally:
        server.stop()
    result["log"] = server.kernel_lines()
    result["log_tail"] = [] if result["state"] == "served" else server.lines()[-25:]
    return result


def judge_kernels(name: str, pinned: list[str], log: str) -> dict[str, Any]:
    matches = {pattern: bool(re.search(pattern, log)) for pattern in pinned}
    claim = f"{name}: the log names every kernel that the profile pins"
    return row(claim, all(matches.values()), [], **matches)


def prove(tree: Path, out: Path, plan_path: Path, kind: str = "") -> list[dict[str, Any]]:
    """Serve ``tree``, write the result file, return the rows.

    Args:
        tree: the checkpoint.
        out: the result file.
        plan_path: output of ``spark-deploy plan --estimate --json``; the first host counts.
        kind: ``pictures`` keeps the vision tower, ``long`` samples the watchdog's metrics.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    log_path = out.with_suffix(".log")
    plan = json.loads(plan_path.read_text())[0]
    result = serve(plan, str(tree), log_path, kind)
    profile = plan["serve"]["profile"]
    if kind == "long":
        rows = serve_long.judge(result, profile)
    else:
        rows = serve_talk.judge(result, profile, pictures=kind == "pictures")
        pinned = [text for text in plan["serve"]["check"]["log_required"] if "Using " in text]
        name = f"{profile}, {kind}" if kind else profile
        rows.append(judge_kernels(name, pinned, "\n".join(result["log"])))
    document = {**stages.environment(), "tree": tree.name, "seed": 0, "rows": rows, **result}
    write_result(out, document)
    return rows
