"""The cases of `bench --tools` through the parsers of every engine.

Each call is written as the chat template writes it into a conversation, so a model that writes
what it reads is understood. RESULTS=write updates proofs/results/cpu/tool-calls.json.
"""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine_process import run_engine
from spark_vllm import SUPPORTED_ENGINES
from wheel_sources import RELEASES, fetch

from lab.engine.patch import ENGINE_VERSION
from lab.model import lessons
from proofs.result_files import describe_run
from spark_deploy.bench.protocols import find_problem, merge_deltas, read_cases
from spark_deploy.config.checkout import CHECKOUT
from tests import chat_templates

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).with_name("engine_tool_parsers.py")
CASES = list(read_cases())
QWEN = {"tool_call": "qwen3_coder", "reasoning": "qwen3"}
PARTS = ("vllm/parser/", "vllm/tool_parsers/", "vllm/reasoning/")
HERMES = {"tool_call": "hermes", "reasoning": "qwen3"}
RESULTS = CHECKOUT / "proofs/results/cpu/tool-calls.json"


def as_turn(case):
    calls = [{"function": {"name": name, "arguments": dict(a)}} for name, a in case.calls]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def lab_text(case):
    prompt = lessons.render([as_turn(case)], thinking=False)
    return prompt.partition("assistant\n")[2].partition("<|im_end|>")[0]


def qwen_text(case):
    """Return the calls as our template writes them, without the empty reasoning before them."""
    prompt = chat_templates.render(chat_templates.QWEN, [as_turn(case)])
    return prompt.partition("</think>\n\n")[2].partition("<|im_end|>")[0]


def hermes_text(case):
    calls = (
        json.dumps({"name": name, "arguments": a}, ensure_ascii=False) for name, a in case.calls
    )
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


WRITERS = {
    "catalog/templates/qwen3.5.jinja": (QWEN, qwen_text),
    "lab/model/chat_template.jinja": (QWEN, lab_text),
    "hermes": (HERMES, hermes_text),
}


def requests():
    for case in CASES:
        for writer, (parsers, write) in WRITERS.items():
            for stream in (False, True):
                for thinking in (False, True):
                    thought = "I call it.\n</think>\n\n" if thinking else ""
                    yield (case, writer), {
                        "parsers": parsers, "tools": case.tools, "text": thought + write(case),
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


VERSIONS = SUPPORTED_ENGINES[1:]  # 0.30 has other parser interfaces


@pytest.fixture(scope="module")
def correct():
    """Count correct responses by case and writer."""
    counts: Counter[tuple[str, str]] = Counter()
    yield counts
    if os.environ.get("RESULTS") == "write":
        write_results(counts)


def write_results(correct):
    everything = len(list(requests())) // len(CASES) // len(WRITERS) * len(VERSIONS)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        numbers = {writer: correct[case.name, writer] for writer in WRITERS}
        claim = f"{case.name}: all {everything} responses of each writer keep types and values"
        passed = set(numbers.values()) == {everything}
        rows.append({"claim": claim, "passed": passed, "numbers": numbers})
    document = {
        "command": "RESULTS=write pytest tests/engine/test_tool_calls.py",
        **describe_run("x86_64 CPU"),
        "versions": {RELEASES[version].project: version for version in VERSIONS},
        "caveats": ["no model: templates write the calls that the engine's parsers read"],
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


@pytest.mark.parametrize("version", VERSIONS)
def test_tool_calls_are_parsed_in_complete_and_streamed_responses(version, tmp_path, correct):
    written, bodies = zip(*requests(), strict=True)
    (tmp_path / "requests.json").write_text(json.dumps(bodies))
    arguments = [str(tmp_path / name) for name in ("requests.json", "answers.json")]
    arguments += [] if version == ENGINE_VERSION else [str(copy_parsers(version, tmp_path))]
    run_engine(tmp_path, str(SCRIPT), *arguments)
    answers = json.loads((tmp_path / "answers.json").read_text())
    problems = []
    for (case, writer), body, answer in zip(written, bodies, answers, strict=True):
        if body["stream"]:
            answer = merge_deltas({"choices": [{"delta": delta}]} for delta in answer["deltas"])
        if problem := find_problem(case, answer):
            problems.append((writer, case.name, body["stream"], body["thinking"], problem))
        else:
            correct[case.name, writer] += 1
    assert problems == []
