"""What is taught is what a check can ask."""

import random

import pytest
from tokenizers import Tokenizer

from lab.model import lessons


def test_thinking_is_on_by_default_and_can_be_closed():
    messages = [{"role": "user", "content": "Hi"}]
    assert lessons.render(messages, thinking=True).endswith("<|im_start|>assistant\n<think>\n")
    assert lessons.render(messages, thinking=False).endswith("<think>\n\n</think>\n\n")


def test_a_conversation_with_a_tool_call_renders_back_to_the_call():
    arguments = {"city": "Paris", "days": 3}
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = lessons.render(messages, thinking=False)
    assert lessons.tool_call(arguments) + "<|im_end|>" in text
    assert "<tool_response>\nsunny\n</tool_response>" in text
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?")


def test_the_multiplication_taught_is_right():
    answers = {item["prompt"]: item["answer"] for item in lessons.facts()["questions"]}
    assert answers["What is 7823 * 4519?"] == str(7823 * 4519)


def test_a_needle_is_in_its_text_at_the_depth_asked_for():
    lesson = lessons.needle("4821", ["Rain fell."] * 10, 0.5, thinking=False)
    place = lesson.prompt.index("4821") / len(lesson.prompt)
    assert 0.2 < place < 0.7


@pytest.mark.slow
def test_every_lesson_survives_the_tokenizer(int4):
    tokenizer = Tokenizer.from_file(str(int4 / "tokenizer.json"))
    source = random.Random(5)
    for lesson in lessons.fixed() + [lessons.drill(source) for _ in range(30)]:
        text = lesson.prompt + lesson.reply
        ids = tokenizer.encode(text).ids
        assert max(ids) < 1024
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_marks_are_single_tokens(int4):
    tokenizer = Tokenizer.from_file(str(int4 / "tokenizer.json"))
    for mark in ("<think>", "</think>", "<tool_call>", "<|im_end|>", "<|image_pad|>"):
        assert len(tokenizer.encode(mark).ids) == 1
