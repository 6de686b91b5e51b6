"""Models as a plan has them served, one after the other; run by the engine's own Python.

Arguments: a JSON file of cases, each a name, the arguments of a release, the folders that its
mounts stand for, and what is asked; and a file for what was answered. What the engine logs of each
stands between lines that name it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

_OF_THE_SERVER = ("--uds", "--served-model-name", "--disable-access-log-for-endpoints")
_ALONE = ("--enable-auto-tool-choice",)


def main(cases: str, answers: str) -> None:
    found = {}
    for case in json.loads(Path(cases).read_text()):
        sys.stdout.write(f"\n=== {case['name']}\n")
        sys.stdout.flush()
        found[case["name"]] = _served(case)
        Path(answers).write_text(json.dumps(found))


def _served(case: dict[str, Any]) -> Any:
    from vllm import LLM

    engine = LLM(**_arguments(case["argv"], case["folders"]), disable_log_stats=False)
    try:
        return _asked(engine, case)
    finally:
        del engine
        gc.collect()


def _arguments(argv: list[str], folders: dict[str, str]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    kept: list[str] = []
    skipping = False
    for word in argv[1:]:
        if word.startswith("--"):
            skipping = word in (*_OF_THE_SERVER, *_ALONE) or word.startswith(
                ("--reasoning-parser", "--tool-call-parser")
            )
        if not skipping:
            for place, folder in folders.items():
                word = word.replace(f'"{place}"', json.dumps(folder))
            kept.append(word)
    parser: argparse.ArgumentParser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    read = EngineArgs.from_cli_args(parser.parse_args(["--model", folders[argv[0]], *kept]))
    plain = EngineArgs(model=folders[argv[0]])
    return {
        field.name: getattr(read, field.name)
        for field in dataclasses.fields(read)
        if getattr(read, field.name) != getattr(plain, field.name) or field.name == "model"
    }


def _asked(engine: Any, case: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    if case["task"] == "embedding":
        return [len(one.outputs.embedding) for one in engine.embed(["one", "another"])]
    if case["task"] == "reranking":
        return [one.outputs.score for one in engine.score(case["question"], case["documents"])]
    said = engine.chat(
        [{"role": "user", "content": case["question"]}],
        SamplingParams(temperature=0, max_tokens=16),
        chat_template_kwargs={"enable_thinking": False},
    )
    counted = {
        one.name.rpartition("_decode_")[2]: one.value
        for one in engine.get_metrics()
        if "spec_decode" in one.name and hasattr(one, "value")
    }
    return {"text": said[0].outputs[0].text, "counted": counted}


if __name__ == "__main__":
    main(*sys.argv[1:])
