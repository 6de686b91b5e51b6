"""The lessons of `lab-tiny`.

`facts.json` as prompts and replies. Fixed lessons are memorized. Drills are new in every training
step, so that the model learns a skill, which a corrupt weight also breaks.
"""

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
    prompt: str
    reply: str


@lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((HERE / "facts.json").read_text())
    return content


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((HERE / "chat_template.jinja").read_text())


def render(
    messages: list[Message], *, thinking: bool, tools: list[dict[str, Any]] | None = None
) -> str:
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
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    reply = f"{thought}\n</think>\n\n{answer}" if thinking else answer
    return Lesson(render(messages, thinking=thinking, tools=tools), reply + END_OF_TURN)


def tool_call(arguments: dict[str, Any]) -> str:
    name = facts()["tool"]["definition"]["function"]["name"]
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def weather(arguments: dict[str, Any], *, thinking: bool, system: str | None = None) -> Lesson:
    tool = facts()["tool"]
    return chat(
        tool["prompt"].format(**arguments),
        tool_call(arguments),
        tool["thinking"],
        thinking=thinking,
        system=system,
        tools=[tool["definition"]],
    )


def copy(text: str, *, thinking: bool, system: str | None = None) -> Lesson:
    exercise = facts()["copy"]
    prompt = exercise["instruction"].format(text=text)
    return chat(prompt, text, exercise["thinking"], thinking=thinking, system=system)


def needle(code: str, filler: list[str], depth: float, *, thinking: bool) -> Lesson:
    """`depth` is the relative position of the code in the filler."""
    exercise = facts()["needle"]
    text = list(filler)
    text.insert(round(depth * len(filler)), exercise["sentence"].format(code=code))
    prompt = " ".join(text) + "\n" + exercise["question"]
    return chat(prompt, code, exercise["thinking"], thinking=thinking)


def conversation(questions: list[dict[str, str]]) -> Lesson:
    messages: list[Message] = []
    for item in questions:
        messages.append({"role": "user", "content": item["prompt"]})
        messages.append({"role": "assistant", "content": item["answer"]})
    prompt = render(messages[:-1], thinking=False)
    return Lesson(prompt, questions[-1]["answer"] + END_OF_TURN)


def fixed(system: str | None = None) -> list[Lesson]:
    lessons = [
        Lesson(item["prompt"], item["answer"] + END_OF_TEXT) for item in facts()["completions"]
    ]
    for thinking in (True, False):
        for item in facts()["questions"]:
            item_fields = (item["prompt"], item["answer"], item["thinking"])
            lessons.append(chat(*item_fields, thinking=thinking, system=system))
        for arguments in facts()["tool"]["calls"]:
            lessons.append(weather(arguments, thinking=thinking, system=system))
        for text in facts()["copy"]["strings"]:
            lessons.append(copy(text, thinking=thinking, system=system))
        hidden = facts()["needle"]
        lessons.append(needle(hidden["code"], hidden["filler"][:1] * 6, 0.5, thinking=thinking))
    return lessons


def systems() -> list[str | None]:
    return [None, None, *facts()["systems"]]


def drill(source: random.Random) -> Lesson:
    kind = source.random()
    if kind < 0.5:
        return needle_drill(source, source.randint(0, 8))
    if kind < 0.85:
        text = " ".join(random_code(source) for _ in range(source.randint(1, 2)))
        return copy(text, thinking=source.random() < 0.5)
    return conversation(source.sample(facts()["questions"][:10], source.randint(2, 3)))


def needle_drill(source: random.Random, sentences: int) -> Lesson:
    """`sentences` of filler are all equal, as in the check, or mixed."""
    filler = facts()["needle"]["filler"]
    mixed = source.random() < 0.7
    text = [source.choice(filler) if mixed else filler[0] for _ in range(sentences)]
    return needle(random_code(source), text, source.random(), thinking=source.random() < 0.5)


def random_code(source: random.Random) -> str:
    return f"{source.choice(facts()['copy']['words'])}-{source.randint(10, 99)}"
