import hashlib
import itertools

import jinja2
import pytest

from tests.chat_templates import QWEN, render

TOOL = {"type": "function", "function": {"name": "read", "description": "Read é <file>"}}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
QUESTION = {"role": "user", "content": "What is in a?"}
FINAL = {"role": "user", "content": [{"type": "text", "text": "Thanks "}, {"type": "image"}]}
RESULT = {"role": "tool", "content": "é\n"}
ARGUMENTS = {"path": "a", "lines": [1, None, {"é": True}], "count": 3, "all": True, "part": 0.5}


def calling(*arguments, **message):
    calls = [{"type": "function", "function": {"name": "read", "arguments": a}} for a in arguments]
    return {"role": "assistant", "content": None, "tool_calls": calls, **message}


HEADS = [[], [SYSTEM], [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]]
CALLS = [
    [calling(ARGUMENTS), RESULT],
    [calling(ARGUMENTS, {}, content="I read.", reasoning_content=" Hm.\n"), RESULT, RESULT],
    [{"role": "assistant", "content": "<think>\nHm.\n</think>\n\nNothing.", "tool_calls": None}],
    [calling({}), RESULT, {"role": "assistant", "content": "Done."}],
]
ENDS = [[], [FINAL], [{"role": "user", "content": "<tool_response>\n7\n</tool_response>"}]]
VARIABLES = [
    {"tools": tools, "add_generation_prompt": prompt, "add_vision_id": prompt, **thinking}
    for tools, prompt, thinking in itertools.product(
        (None, [TOOL, TOOL]),
        (True, False),
        ({}, {"enable_thinking": True}, {"enable_thinking": False}),
    )
]
ORDINARY = [
    ([*head, FINAL, *calls, QUESTION, *others, *end], variables)
    for head, calls, others, end, variables in itertools.product(
        HEADS, CALLS, CALLS, ENDS, VARIABLES
    )
]
# Of the prompts of these conversations by Qwen's own template, whose sha256 is
# a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715.
ORIGINAL = "18762d60a1e7a00d54056a79b4e8fd6bd7a83f31dd8200ed37f7d923d93e32a2"


def test_qwen_prompts_of_ordinary_conversations_equal_those_of_the_original_template():
    assert len(ORDINARY) == 1728
    prompts = [render(QWEN, messages, **variables) for messages, variables in ORDINARY]
    assert hashlib.sha256("\0".join(prompts).encode()).hexdigest() == ORIGINAL


def turns(messages, **variables):
    return render(QWEN, messages, **variables).split("<|im_start|>")[1:]


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_developer_message_is_a_system_message(tools):
    developer = {**SYSTEM, "role": "developer"}
    expected = render(QWEN, [SYSTEM, QUESTION], tools=tools)
    assert "Be brief.<|im_end|>" in expected
    assert render(QWEN, [developer, QUESTION], tools=tools) == expected


@pytest.mark.parametrize("role", ["system", "developer"])
def test_later_system_message_stays_in_place(role):
    later = {"role": role, "content": "Now in French."}
    before = render(QWEN, [SYSTEM, QUESTION], tools=[TOOL])
    after = render(QWEN, [SYSTEM, QUESTION, later, QUESTION], tools=[TOOL])
    assert after.startswith(before)  # a cached prefix still matches
    question = "<|im_start|>user\nWhat is in a?<|im_end|>\n"
    assert after == f"{before}<|im_start|>system\nNow in French.<|im_end|>\n{question}"


def test_second_leading_system_message_follows_the_first():
    second = {"role": "developer", "content": "Use tools."}
    assert turns([SYSTEM, second, QUESTION])[:2] == [
        "system\nBe brief.<|im_end|>\n", "system\nUse tools.<|im_end|>\n",
    ]  # fmt: skip


def test_null_argument_is_json():
    [_, call, _] = turns([QUESTION, calling({"limit": None}), RESULT])
    assert "<parameter=limit>\nnull\n</parameter>\n" in call


@pytest.mark.parametrize("text", ['{"path": "a"}', "", None])
def test_argument_text_is_kept(text):
    [_, call, _] = turns([QUESTION, calling(text), RESULT])
    line = f"{text}\n" if text else ""
    assert f"<tool_call>\n<function=read>\n{line}</function>\n</tool_call><|im_end|>" in call


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_calls_without_content(content):
    message = {key: value for key, value in calling({}).items() if key != "content"} | content
    [_, call, _] = turns([QUESTION, message, RESULT])
    assert call.startswith("assistant\n<think>\n\n</think>\n\n<tool_call>\n")


def test_conversation_without_a_question():
    assert turns([calling({}), RESULT])[1].startswith("user\n<tool_response>\n")


@pytest.mark.parametrize(
    "message", [{"role": "critic", "content": ""}, {"role": "user", "content": [{"type": "pdf"}]}]
)
def test_rejects_unknown_role_and_content(message):
    with pytest.raises(jinja2.TemplateError, match=r"unknown role critic|no text, image or video"):
        render(QWEN, [QUESTION, message])
