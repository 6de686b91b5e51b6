"""The five prompts that the community's table of this stack was made with, by kind and length."""

from __future__ import annotations

import json
import ssl
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from spark_deploy.config.errors import SparkError

_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a model is asked; ``key`` is never printed."""

    base_url: str  # ends in /v1
    model: str
    key: str
    ca: str | None = None

    def __repr__(self) -> str:
        return f"Endpoint({self.base_url}, {self.model})"


@dataclass(frozen=True, slots=True)
class Timed:
    """How long an answer took, and its tokens."""

    prompt_tokens: int
    completion_tokens: int
    first_token_s: float
    wall_s: float


def ask(endpoint: Endpoint, text: str, tokens: int) -> Timed:
    """Ask once, greedily, and return what the answer took.

    Raises:
        SparkError: no whole answer came.
    """
    body = {
        "model": endpoint.model, "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = _connection(endpoint)
    try:
        return _answer(connection, endpoint, body)
    except (OSError, HTTPException, ValueError) as error:
        raise _problem(endpoint, f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _connection(endpoint: Endpoint) -> HTTPConnection:
    url = urlsplit(endpoint.base_url)
    if url.scheme == "https":
        context = ssl.create_default_context(cafile=endpoint.ca)
        return HTTPSConnection(url.hostname or "", url.port, timeout=_LIMIT_S, context=context)
    return HTTPConnection(url.hostname or "", url.port, timeout=_LIMIT_S)


def _answer(connection: HTTPConnection, endpoint: Endpoint, body: dict[str, Any]) -> Timed:
    began = time.monotonic()
    headers = {"Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"}
    path = f"{urlsplit(endpoint.base_url).path}/chat/completions"
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        told = response.read(300).decode(errors="replace")
        raise _problem(endpoint, f"answered {response.status}: {told}")
    first: float | None = None
    usage: dict[str, Any] = {}
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        piece = json.loads(line[6:])
        usage = piece.get("usage") or usage
        if first is None and any(_has_text(choice) for choice in piece.get("choices") or ()):
            first = time.monotonic() - began
    wall_s = time.monotonic() - began
    if first is None or not usage:
        raise _problem(endpoint, "ended its answer without a token or without counting them")
    counted = (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    return Timed(*counted, first, wall_s)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content"))


def _problem(endpoint: Endpoint, what: str) -> SparkError:
    fix = "`spark-deploy status` says what the host serves; then run again"
    return SparkError.one(endpoint.base_url, what, fix)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question and how long its answer may be."""

    name: str
    tokens: int
    text: str


SEEDS = (
    Prompt(
        "Q&A", 256, "Explain why the sky is blue and sunsets are red, for a curious adult."
    ),
    Prompt(
        "code", 512, "Write a Python class for a least-recently-used cache, with type hints, "
        "docstrings and three unit tests."
    ),
    Prompt(
        "JSON", 1024, "Return a JSON array of 20 fictional employees, each with id, name, email, "
        "department, salary, a list of skills and an address object. JSON only."
    ),
    Prompt("math", 64, "What is 7823 * 4519? Answer with the number only."),
    Prompt(
        "long code", 2048, "Write a complete command-line to-do application in Python: argparse, "
        "storage in SQLite, add, list, finish, delete and search, error handling, and tests. "
        "Show every file in full."
    ),
)  # fmt: skip
RUNS = 2  # the first one warms up
