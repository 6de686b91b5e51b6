"""Benchmark protocols for clients: `seeds` (five prompts), `llama-benchy` and `tools`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from spark_deploy.bench.host import Note, ticking
from spark_deploy.bench.result import Answer, Cell, ToolCase
from spark_deploy.config.errors import SparkError
from spark_deploy.config.schema_errors import schema_problems


class RejectedError(SparkError):
    """The engine rejected a request (HTTP 400)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    base_url: str  # ends in /v1
    model: str
    key: str
    ca: str | None = None

    def __repr__(self) -> str:  # without the key
        return f"Endpoint({self.base_url}, {self.model})"


# --- seeds: the prompts behind the published table (bench_qwen35.sh in
# albond/DGX_Spark_Qwen3.5-122B-A10B-AR-INT4)

_REQUEST_TIMEOUT_S = 1800.0
RUNS = 2  # the first run is the warm-up
# Name, maximum answer tokens, and text of each prompt.
SEEDS = (
    ("Q&A", 256, "What are the main differences between TCP and UDP? Be concise."),
    (
        "code", 512, "Write a Python function that implements binary search on a sorted list. "
        "Include type hints and docstring."
    ),
    (
        "JSON", 1024, "Generate a JSON array of 10 fictional employees with fields: name, age, "
        "department, salary, email, skills (array of 3). Output ONLY valid JSON, no explanation."
    ),
    ("math", 64, "What is 7823 * 4519? Show only the answer."),
    (
        "long code", 2048, "Write a complete Python implementation of a red-black tree with "
        "insert, delete, search, and in-order traversal. Include all rotation methods."
    ),
)  # fmt: skip


def measure_seeds(endpoint: Endpoint, context_tokens: int, note: Note) -> Iterator[Answer]:
    """Yield an answer for each run and prompt; an answer uses at most half of the context."""
    for run in range(1, RUNS + 1):
        for name, tokens, text in SEEDS:
            title = f"seeds, run {run}, {name}"
            with ticking(title, note):
                answer = measure_answer(endpoint, text, min(tokens, context_tokens // 2))
            speed = f"{answer.tokens_per_s:.1f} tok/s"
            note(f"{title}: {answer.completion_tokens} tokens, {speed}, "
                 f"first token after {answer.first_token_s:.2f} s")  # fmt: skip
            yield replace(answer, prompt=name, run=run)


def measure_answer(
    endpoint: Endpoint,
    text: str,
    tokens: int,
    *,
    temperature: float | None = 0,
    show: Callable[[str, bool], None] = lambda piece, is_reasoning: None,
) -> Answer:
    """Stream and time an answer; raise if it is incomplete.

    ``show`` receives each part of the text and whether it is reasoning. A temperature of None
    selects the server's default.
    """
    body = {
        "model": endpoint.model, "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True},
        **({} if temperature is None else {"temperature": temperature}),
    }  # fmt: skip
    usage, first_s = dict[str, Any](), None
    started = time.monotonic()
    for chunk in send_chat_request(endpoint, body):
        usage = chunk.get("usage") or usage
        for piece, is_reasoning in _delta_texts(chunk):
            first_s = first_s or time.monotonic() - started
            show(piece, is_reasoning)
    wall_s = time.monotonic() - started
    if first_s is None or not usage:
        raise _endpoint_error(endpoint, "the answer has no tokens or no usage block")
    counts = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    return Answer("", 1, tokens, *counts, round(first_s, 4), round(wall_s, 4))


def send_chat_request(endpoint: Endpoint, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Send a chat request; yield the chunks of the stream, or the whole response."""
    url = urlsplit(endpoint.base_url)
    address = (url.hostname or "", url.port)
    connection = HTTPConnection(*address, timeout=_REQUEST_TIMEOUT_S)
    if url.scheme == "https":
        trust = ssl.create_default_context(cafile=endpoint.ca)
        connection = HTTPSConnection(*address, timeout=_REQUEST_TIMEOUT_S, context=trust)
    try:
        headers = {"Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"}
        connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            excerpt = response.read(300).decode(errors="replace")
            error_type = RejectedError if response.status == 400 else SparkError
            raise _endpoint_error(
                endpoint, f"returned HTTP {response.status}: {excerpt}", error_type
            )
        if not body.get("stream"):
            yield json.loads(response.read())
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))
    except (OSError, HTTPException, ValueError) as error:
        raise _endpoint_error(endpoint, f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _endpoint_error(
    endpoint: Endpoint, problem: str, error_type: type[SparkError] = SparkError
) -> SparkError:
    fix = "run `spark-deploy status`, fix the server, then run this command again"
    return error_type.single(endpoint.base_url, problem, fix)


def _delta_texts(chunk: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            yield reasoning, True
        if content := delta.get("content"):
            yield content, False


# --- llama-benchy: the published package, with Spark Arena's grid, version 2

GRID_NAME = "spark-arena-v2"
# The key is in the environment, because every user on this machine can read argv.
_LAUNCH = (
    "import os, sys; sys.argv[1:1] = ['--api-key', os.environ.pop('SPARK_BENCH_KEY')]; "
    "from llama_benchy.__main__ import main; main()"
)


@dataclass(frozen=True, slots=True)
class Grid:
    depths: tuple[int, ...] = (0, 4096, 8192, 16384, 32768, 65535, 100000)
    concurrencies: tuple[int, ...] = (1, 2, 5, 10)
    runs: int = 3
    prompt_tokens: int = 2048
    answer_tokens: int = 128

    def limited_to(self, context_tokens: int) -> Grid:
        room = context_tokens - self.prompt_tokens - self.answer_tokens
        return replace(self, depths=tuple(depth for depth in self.depths if depth <= room))


def find_benchy_python() -> str | None:
    """Return a Python that has llama-benchy: this one, or that of the installed command."""
    if importlib.util.find_spec("llama_benchy"):
        return sys.executable
    command = shutil.which("llama-benchy")
    if command is None:
        return None
    first_line = Path(command).read_text(errors="replace").splitlines()[0]
    return first_line.removeprefix("#!").strip() if first_line.startswith("#!/") else None


def measure_grid(
    python: str, endpoint: Endpoint, tokenizer: Path, grid: Grid, result: Path,
    extra_options: Sequence[str],
) -> tuple[str, tuple[Cell, ...]]:  # fmt: skip
    """Run llama-benchy, which writes the ``result`` file; return the version and the cases."""
    options = [
        "--base-url", endpoint.base_url, "--model", endpoint.model, "--tokenizer", str(tokenizer),
        "--pp", str(grid.prompt_tokens), "--tg", str(grid.answer_tokens),
        "--depth", *map(str, grid.depths), "--concurrency", *map(str, grid.concurrencies),
        "--runs", str(grid.runs), "--enable-prefix-caching",
        "--save-result", str(result), "--format", "json", *extra_options,
    ]  # fmt: skip
    trust = {"SSL_CERT_FILE": endpoint.ca, "REQUESTS_CA_BUNDLE": endpoint.ca} if endpoint.ca else {}
    process = subprocess.run(
        [python, "-c", _LAUNCH, *options],
        env={**os.environ, **trust, "SPARK_BENCH_KEY": endpoint.key},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if process.returncode != 0 or not result.is_file():
        tail = "\n".join(process.stdout.strip().splitlines()[-8:])
        fix = "fix this error, then run the benchmark again"
        raise SparkError.single("llama-benchy", f"failed:\n{tail}", fix)
    return parse_cells(json.loads(result.read_text()))


def parse_cells(data: dict[str, Any]) -> tuple[str, tuple[Cell, ...]]:
    def figure(case: dict[str, Any], name: str, part: str = "mean") -> float | None:
        return round(float(case[name][part]), 3) if case.get(name) else None

    cells = tuple(
        Cell(
            case["context_size"], case["concurrency"], case["prompt_size"], case["response_size"],
            figure(case, "pp_throughput"), figure(case, "tg_throughput"),
            figure(case, "tg_throughput", "std"), figure(case, "ttfr"),
        )
        for case in data["benchmarks"]
        if not case["is_context_prefill_phase"]
    )  # fmt: skip
    return str(data["version"]), cells


# --- tools: requests whose tool calls must have exact names, types and values

_CALL_TOKENS = 512
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
            earlier_calls = _as_openai(turn["calls"])
            messages += [
                _user_message(turn),
                {"role": "assistant", "content": None, "tool_calls": earlier_calls},
            ]
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(earlier_calls, turn["results"], strict=True)
            ]
        calls = tuple(item for call in case["calls"] for item in call.items())
        offered = dict.fromkeys([*(tool for tool, _ in calls), *case.get("also", ())])
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
            chunks = send_chat_request(endpoint, _request_body(endpoint, case))
            problem = find_problem(case, merge_deltas(chunks))
        except RejectedError as error:
            problem = error.problems[0].line
        note(f"tools, {case.name}: {problem or 'correct'}")
        yield ToolCase(case.name, problem)


def _request_body(endpoint: Endpoint, case: Case) -> dict[str, Any]:
    return {
        "model": endpoint.model, "messages": case.messages, "tools": case.tools,
        "tool_choice": "auto", "temperature": 0, "max_tokens": _CALL_TOKENS, "stream": case.stream,
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip


def merge_deltas(chunks: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Join the chunks of a message; a message that is not streamed is a single chunk."""
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
            return f"called {name!r}, but the request has no such tool"
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
