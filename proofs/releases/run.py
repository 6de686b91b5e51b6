"""Serve planned releases, judge the answers, write result files."""

import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spark_contract.release import Release

from proofs import result_files
from proofs.engine.run import visible_devices
from proofs.judges.answers import judge_engines
from proofs.releases import asking, judge
from proofs.releases.server import Server, read_release, servers_of
from proofs.result_files import write_result

Row = dict[str, Any]
START_S = 420
SPECULATION = "--speculative-config"
RAW = ("answers", "compared")
WAYS = ("via NET/", "via P2P", "via SHM")


@dataclass(frozen=True)
class Run:
    name: str
    plan: str
    tree: str
    ask: Callable[[Server, Release], Row]
    alone: bool = False
    drafts: bool = True


def _recall(server: Server, release: Release) -> Row:
    return {"answers": asking.ask_recall_questions(server, release.names[0])}


def _plain(server: Server, release: Release) -> Row:
    # Count drafts before the check adds more.
    result: Row = {
        "answers": asking.ask_check_questions(server, release),
        "drafts": asking.count_drafts(server),
    }
    result["compared"] = asking.record_answers(server, release)
    return {**result, "check": asking.run_check(server, release)}


def _pictures(server: Server, release: Release) -> Row:
    result = {"documents": asking.ask_about_pictures(server, release.names[0])}
    return {**result, "check": asking.run_check(server, release)}


STAGES: dict[str, tuple[Run, ...]] = {
    "cluster": (
        Run("one-host", "cluster-overlay", "pair-overlay", _recall, alone=True),
        Run("two-hosts-overlay", "cluster-overlay", "pair-overlay", _recall),
        Run("two-hosts-full", "cluster-full", "pair-full", _recall),
    ),
    "plain": (
        Run("plain-fp8", "plain-fp8", "plain-fp8", _plain),
        Run("plain-fp8-without", "plain-fp8", "plain-fp8", _plain, drafts=False),
        Run("plain-bf16", "plain-bf16", "plain-bf16", _plain),
        Run("plain-bf16-without", "plain-bf16", "plain-bf16", _plain, drafts=False),
        Run("plain-ngram", "plain-ngram", "plain-bf16", _plain),
    ),
    "seeing": (
        Run("seeing", "seeing", "seeing", _pictures),
        Run("seeing-other", "seeing", "seeing-other", _pictures),
        Run("seeing-blind", "seeing", "seeing-blind", _pictures),
    ),
}
JUDGES: dict[str, Callable[[dict[str, Row]], list[Row]]] = {
    "cluster": judge.judge_cluster,
    "plain": judge.judge_plain,
    "seeing": judge.judge_seeing,
}


def serve(run: Run, trees: Path, plans: Path, work: Path, devices: list[str]) -> Row:
    release = read_release(plans / f"{run.plan}.json")
    if not run.drafts:
        release = _without_drafts(release)
    folder = work / run.name
    folder.mkdir(parents=True, exist_ok=True)
    engines = servers_of(
        release, trees / run.tree, folder, run.name, devices=devices, alone=run.alone
    )
    result: Row = {
        "plan": run.plan,
        "tree": run.tree,
        "release": release.name,
        "argv": [engine.argv for engine in engines],
        "env": [_changed_env(engine) for engine in engines],
        "changed": [engine.changed for engine in engines],
        "state": "died",
    }
    try:
        for engine in reversed(engines):
            engine.start(apart=len(engines) > 1)
        result["healthy_s"] = engines[0].healthy(START_S)
        if result["healthy_s"] is not None:
            result.update(run.ask(engines[0], release))
            result.setdefault("drafts", asking.count_drafts(engines[0]))
            result["state"] = "served"
    except Exception:  # a partial result is a result too
        result["error"] = traceback.format_exc()[-1500:]
    finally:
        for engine in engines:
            engine.stop()
    lines = [line for engine in engines for line in engine.lines()]
    result["log"] = sorted({line for engine in engines for line in engine.kernel_lines()})
    result["ways"] = {channel: sum(channel in line for line in lines) for channel in WAYS}
    if result["state"] != "served":
        result["log_tail"] = [engine.lines()[-25:] for engine in engines]
    print(f"phase=served name={run.name} {result['state']} {result.get('healthy_s')}", flush=True)
    return result


def _changed_env(server: Server) -> dict[str, str]:
    return {key: value for key, value in sorted(server.env.items()) if os.environ.get(key) != value}


def _drop_raw(name: str, result: Row, rows: list[Row]) -> Row:
    whole = name in result_files.failed_engines(rows)
    return {key: value for key, value in result.items() if whole or key not in RAW}


def _without_drafts(release: Release) -> Release:
    argv = list(release.engine.argv)
    index = argv.index(SPECULATION)
    del argv[index : index + 2]
    check = replace(release.check, acceptance_floor=None)
    return replace(release, engine=replace(release.engine, argv=tuple(argv)), check=check)


def prove(stage: str, trees: Path, plans: Path, work: Path, out: Path) -> list[Row]:
    """``cluster`` needs two GPUs; ``trees`` and ``planning`` write the directories."""
    from proofs.stages import environment

    devices = visible_devices()
    runs = STAGES[stage]
    with ThreadPoolExecutor(len(runs)) as pool:
        waiting = {}
        for number, run in enumerate(runs):
            order = devices if number % 2 == 0 or len(devices) < 2 else devices[::-1]
            waiting[run.name] = pool.submit(serve, run, trees, plans, work, order)
        results = {name: job.result() for name, job in waiting.items()}
    rows = judge_engines(results, JUDGES[stage], results)
    document = {
        **environment(),
        "seed": 0,
        "rows": rows,
        # Keep full answers of failed rows only.
        "runs": {name: _drop_raw(name, result, rows) for name, result in results.items()},
    }
    write_result(out / f"release-{stage}.json", document)
    return rows
