"""The shipped chat template in the engine, whose server prepares messages for it."""

import json
from pathlib import Path

import pytest
from engine_process import run_engine

from tests.chat_templates import QWEN, render

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("engine_chat_template.py")
TOOL = {"type": "function", "function": {"name": "read", "description": "Read é <file>"}}
ARGUMENTS = {"path": "a\n", "lines": [1, {"é": None}], "limit": None, "all": True}
RESULT = {"role": "tool", "content": "é"}
IMAGE = {"role": "user", "content": [{"type": "text", "text": "And this?"}, {"type": "image"}]}


def conversation(arguments):
    call = {"type": "function", "function": {"name": "read", "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "What is in a?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        RESULT,
        {"role": "system", "content": "Now in French."},
        IMAGE,
    ]


def test_engine_passes_openai_messages_to_the_template(tmp_path):
    variables = [
        {"tools": tools, "add_generation_prompt": True, "enable_thinking": thinking}
        for tools in (None, [TOOL])
        for thinking in (False, True)
    ]
    sent = [(conversation(json.dumps(ARGUMENTS)), chosen) for chosen in variables]
    for name, text in (("template", QWEN), ("conversations", json.dumps(sent))):
        (tmp_path / name).write_text(text)
    run_engine(
        tmp_path, str(SCRIPT), *(str(tmp_path / n) for n in ("template", "conversations", "answer"))
    )
    found = json.loads((tmp_path / "answer").read_text())
    assert found["prompts"] == [
        render(QWEN, conversation(ARGUMENTS), **chosen) for chosen in variables
    ]
    # The engine leaves images, roles and these variables to the template.
    assert found["content_format"] == "openai"
    assert found["handles_developer"]
    assert {"enable_thinking", "add_vision_id"} <= {*found["variables"]}
