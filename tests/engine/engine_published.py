"""Run planned models in sequence; run by the engine's Python.

Arguments: a JSON file of cases (name, arguments of a release, folders of the mounts, request) and a
file for the answers. A line with the case's name precedes the engine's log of each.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

_SERVER_OPTIONS = (
    "--uds", "--served-model-name", "--disable-access-log-for-endpoints",
    "--enable-auto-tool-choice", "--reasoning-parser", "--tool-call-parser",
)  # fmt: skip


def main(cases: str, answers: str) -> None:
    results = {}
    for case in json.loads(Path(cases).read_text()):
        sys.stdout.write(f"\n=== {case['name']}\n")
        sys.stdout.flush()
        results[case["name"]] = _run_case(case)
        Path(answers).write_text(json.dumps(results))


def _run_case(case: dict[str, Any]) -> Any:
    from vllm import LLM

    engine = LLM(**_arguments(case["argv"], case["folders"]), disable_log_stats=False)
    try:
        return _answers(engine, case)
    finally:
        del engine
        gc.collect()


def _arguments(argv: list[str], folders: dict[str, str]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words: list[str] = []
    is_server_option = False
    for word in argv[1:]:
        if word.startswith("--"):
            is_server_option = word.startswith(_SERVER_OPTIONS)
        if not is_server_option:
            for target, folder in folders.items():
                word = word.replace(f'"{target}"', json.dumps(folder))
            words.append(word)
    parser: argparse.ArgumentParser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = EngineArgs.from_cli_args(parser.parse_args(["--model", folders[argv[0]], *words]))
    default = EngineArgs(model=folders[argv[0]])
    return {
        field.name: getattr(parsed, field.name)
        for field in dataclasses.fields(parsed)
        if getattr(parsed, field.name) != getattr(default, field.name) or field.name == "model"
    }


def _answers(engine: Any, case: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    if case["task"] == "embedding":
        return [len(item.outputs.embedding) for item in engine.embed(["one", "another"])]
    if case["task"] == "reranking":
        return [item.outputs.score for item in engine.score(case["question"], case["documents"])]
    replies = engine.chat(
        [{"role": "user", "content": case["question"]}],
        SamplingParams(temperature=0, max_tokens=16),
        chat_template_kwargs={"enable_thinking": False},
    )
    counters = {
        metric.name.rpartition("_decode_")[2]: metric.value
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name and hasattr(metric, "value")
    }
    return {"text": replies[0].outputs[0].text, "counters": counters}


if __name__ == "__main__":
    main(*sys.argv[1:])
