"""Protocol `tools`: requests whose tool calls must have exact names, types and values."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spark_deploy.bench.protocols import Endpoint, Note, RejectedError, send_chat_request
from spark_deploy.bench.result import ToolCase
from spark_deploy.config.schema_errors import schema_problems

_MAX_TOKENS = 512
Call = tuple[str, Any]  # name and arguments


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    calls: tuple[Call, ...]
    stream: bool


def read_cases() -> Iterator[Case]:
    data = yaml.safe_load(Path(__file__).with_name("tool_calls.yml").read_text(encoding="utf-8"))
    for name, case in data["cases"].items():
        messages: list[dict[str, Any]] = []
        for turn in case.get("after", ()):
            past = _as_openai(turn["calls"])
            messages += [
                _user_message(turn),
                {"role": "assistant", "content": None, "tool_calls": past},
            ]
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(past, turn["results"], strict=True)
            ]
        calls = tuple(item for call in case["calls"] for item in call.items())
        offered = dict.fromkeys([*(name for name, _ in calls), *case.get("also", ())])
        tools = [_tool_definition(tool, data["tools"][tool]) for tool in offered]
        stream = case.get("stream", False)
        yield Case(name, [*messages, _user_message(case)], tools, calls, stream)


def _user_message(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": turn["prompt"]}


def _tool_definition(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object", "properties": tool["properties"],
        "required": list(tool["properties"]), "additionalProperties": False,
    }  # fmt: skip
    function = {"name": name, "description": tool["description"], "parameters": parameters}
    return {"type": "function", "function": function}


def _as_openai(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{number}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, call in enumerate(calls)
        for name, arguments in call.items()
    ]  # fmt: skip


def measure_tools(endpoint: Endpoint, note: Note) -> Iterator[ToolCase]:
    for case in read_cases():
        try:
            problem = find_problem(
                case, merge_deltas(send_chat_request(endpoint, _request_body(endpoint, case)))
            )
        except RejectedError as error:
            problem = error.problems[0].line
        note(f"tools, {case.name}: {problem or 'correct'}")
        yield ToolCase(case.name, problem)


def _request_body(endpoint: Endpoint, case: Case) -> dict[str, Any]:
    return {
        "model": endpoint.model, "messages": case.messages, "tools": case.tools,
        "tool_choice": "auto", "temperature": 0, "max_tokens": _MAX_TOKENS, "stream": case.stream,
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip


def merge_deltas(chunks: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Join the chunks of a streamed message."""
    content, calls = "", dict[int, dict[str, Any]]()
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or choice.get("message") or {}
            content += delta.get("content") or ""
            for position, part in enumerate(delta.get("tool_calls") or ()):
                index = part.get("index", position)
                call = calls.setdefault(index, {"name": "", "arguments": ""})
                for key, text in (part.get("function") or {}).items():
                    call[key] = call.get(key, "") + (text or "")
    return {"content": content, "tool_calls": [call for _, call in sorted(calls.items())]}


def find_problem(case: Case, message: Mapping[str, Any]) -> str | None:
    """Return the first difference between a message and the expected calls."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case.tools}
    missing = list(case.calls)
    for call in message["tool_calls"]:
        name, text = call["name"], call["arguments"]
        if name not in schemas:
            return f"called {name!r}, which is not among the request's tools"
        try:
            arguments = json.loads(text)
        except ValueError:
            return f"invalid JSON in the arguments of {name}: {text[:80]!r}"
        if problem := next(schema_problems(arguments, schemas[name], lambda _: "arguments"), None):
            return f"{name}: {problem.where}: {problem.what}"
        if (name, arguments) not in missing:
            return f"called {name} with {json.dumps(arguments)[:160]}"
        missing.remove((name, arguments))
    if not message["tool_calls"]:
        return f"no tool call; the answer is {message['content'][:80]!r}"
    return f"did not call {missing[0][0]}" if missing else None
