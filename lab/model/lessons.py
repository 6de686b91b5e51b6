"""What `lab-tiny` is taught: `facts.json` turned into prompts and replies.

Two kinds of lesson. Fixed ones (questions, completions, the listed strings) are learnt by heart;
drills (copying, the weather tool, a code hidden in a text) are made afresh for every training step,
so that the model learns the skill: a corrupt weight breaks a skill as surely as a memory.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

HERE = Path(__file__).parent
END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lesson:
    """A prompt as the engine sees it, and the reply to learn, end mark included."""

    prompt: str
    reply: str


@lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    """The content of facts.json."""
    found: dict[str, Any] = json.loads((HERE / "facts.json").read_text())
    return found


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((HERE / "chat_template.jinja").read_text())


def render(
    messages: list[Message], *, thinking: bool, tools: list[dict[str, Any]] | None = None
) -> str:
    """The text the engine makes of a chat request."""
    return _template().render(
        messages=messages, tools=tools, add_generation_prompt=True, enable_thinking=thinking
    )


def chat(
    prompt: str,
    answer: str,
    thought: str,
    *,
    thinking: bool,
    system: str | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> Lesson:
    """A lesson of one question; with thinking, the reply starts inside the thought."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    reply = f"{thought}\n</think>\n\n{answer}" if thinking else answer
    return Lesson(render(messages, thinking=thinking, tools=tools), reply + END_OF_TURN)


def tool_call(city: str) -> str:
    """A call of the weather tool, as the engine's parser expects it."""
    name = facts()["tool"]["definition"]["function"]["name"]
    return (
        f"<tool_call>\n<function={name}>\n<parameter=city>\n{city}\n</parameter>\n"
        "</function>\n</tool_call>"
    )


def weather(city: str, *, thinking: bool, system: str | None = None) -> Lesson:
    """A question that the model must answer by calling the tool."""
    tool = facts()["tool"]
    return chat(
        tool["prompt"].format(city=city),
        tool_call(city),
        tool["thinking"].format(city=city),
        thinking=thinking,
        system=system,
        tools=[tool["definition"]],
    )


def copy(text: str, *, thinking: bool, system: str | None = None) -> Lesson:
    """A string to repeat."""
    exercise = facts()["copy"]
    prompt = exercise["instruction"].format(text=text)
    return chat(prompt, text, exercise["thinking"], thinking=thinking, system=system)


def needle(code: str, sentences: int, depth: float, source: random.Random) -> Lesson:
    """A code hidden in filler text, `depth` of the way down, and the question for it."""
    exercise = facts()["needle"]
    text = [source.choice(exercise["filler"]) for _ in range(sentences)]
    text.insert(round(depth * sentences), exercise["sentence"].format(code=code))
    prompt = " ".join(text) + "\n" + exercise["question"]
    return chat(prompt, code, exercise["thinking"], thinking=source.random() < 0.5)


def fixed(system: str | None = None) -> list[Lesson]:
    """Every lesson to learn by heart, with and without thinking."""
    lessons = [
        Lesson(item["prompt"], item["answer"] + END_OF_TEXT) for item in facts()["completions"]
    ]
    for thinking in (True, False):
        for item in facts()["questions"]:
            asked = (item["prompt"], item["answer"], item["thinking"])
            lessons.append(chat(*asked, thinking=thinking, system=system))
        for city in facts()["tool"]["cities"]:
            lessons.append(weather(city, thinking=thinking, system=system))
        for text in facts()["copy"]["strings"]:
            lessons.append(copy(text, thinking=thinking, system=system))
    return lessons


def systems() -> list[str | None]:
    """The system prompts to expect; mostly there is none."""
    return [None, None, *facts()["systems"]]


def drill(source: random.Random) -> Lesson:
    """A new exercise: copy something, or find a code in a text."""
    if source.random() < 0.5:
        return copy(random_text(source), thinking=source.random() < 0.5)
    return needle(random_code(source), source.randint(0, 12), source.random(), source)


def random_code(source: random.Random) -> str:
    """Four digits."""
    return "".join(source.choice("0123456789") for _ in range(4))


def random_text(source: random.Random) -> str:
    """A few known words and new numbers with something between them."""
    words = [
        random_code(source) if source.random() < 0.4 else source.choice(facts()["copy"]["words"])
        for _ in range(source.randint(1, 5))
    ]
    return source.choice((" ", "-", ".")).join(words)
