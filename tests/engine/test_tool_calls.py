"""The cases of `bench --tools` through the parsers of every engine.

Each call is written as the chat template writes it into a conversation, so a model that writes
what it reads is understood.
"""

import json
import shutil
from pathlib import Path

import pytest
from engine_process import run_engine
from spark_vllm import SUPPORTED_ENGINES
from wheel_sources import RELEASES, fetch

from lab.engine.patch import ENGINE_VERSION
from lab.model.lessons import render
from spark_deploy.bench.protocols import find_problem, merge_deltas, read_cases

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).with_name("engine_tool_parsers.py")
CASES = list(read_cases())
QWEN = {"tool_call": "qwen3_coder", "reasoning": "qwen3"}
PARTS = ("vllm/parser/", "vllm/tool_parsers/", "vllm/reasoning/")
HERMES = {"tool_call": "hermes", "reasoning": "qwen3"}


def qwen_text(case):
    calls = [{"function": {"name": name, "arguments": dict(a)}} for name, a in case.calls]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    return render([turn], thinking=False).partition("assistant\n")[2].partition("<|im_end|>")[0]


def hermes_text(case):
    calls = (
        json.dumps({"name": name, "arguments": a}, ensure_ascii=False) for name, a in case.calls
    )
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def requests():
    for case in CASES:
        for parsers, text in ((QWEN, qwen_text(case)), (HERMES, hermes_text(case))):
            for stream in (False, True):
                for thinking in (False, True):
                    thought = "I call it.\n</think>\n\n" if thinking else ""
                    yield case, {
                        "parsers": parsers, "tools": case.tools, "text": thought + text,
                        "stream": stream, "thinking": thinking,
                    }  # fmt: skip


def copy_parsers(version, folder):
    release = RELEASES[version]
    record = f"{release.project.replace('-', '_')}-{version}.dist-info/RECORD"
    lines = (fetch(version, {record}) / record).read_text().splitlines()
    files = {line.split(",")[0] for line in lines if line.startswith(PARTS) and ".py," in line}
    root = fetch(version, files)
    for part in PARTS:
        shutil.copytree(root / part, folder / part)
    return folder


@pytest.mark.parametrize("version", SUPPORTED_ENGINES[1:])  # 0.30 has other parser interfaces
def test_tool_calls_are_parsed_in_complete_and_streamed_responses(version, tmp_path):
    cases, bodies = zip(*requests(), strict=True)
    (tmp_path / "requests.json").write_text(json.dumps(bodies))
    arguments = [str(tmp_path / name) for name in ("requests.json", "answers.json")]
    arguments += [] if version == ENGINE_VERSION else [str(copy_parsers(version, tmp_path))]
    run_engine(tmp_path, str(SCRIPT), *arguments)
    answers = json.loads((tmp_path / "answers.json").read_text())
    problems = []
    for case, body, answer in zip(cases, bodies, answers, strict=True):
        if body["stream"]:
            answer = merge_deltas({"choices": [{"delta": delta}]} for delta in answer["deltas"])
        if problem := find_problem(case, answer):
            name = body["parsers"]["tool_call"]
            problems.append((name, case.name, body["stream"], body["thinking"], problem))
    assert problems == []
