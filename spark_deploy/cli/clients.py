"""What each client needs to talk to a server, ready for a shell or a file.

The key is never among it, but the command that reads it from the host: nothing has to be pasted,
and nothing is left in a history, in argv or in a file.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

QUESTION = "What is 7823 * 4519?"
_WEBUI_IMAGE, _WEBUI_PORT = "ghcr.io/open-webui/open-webui:main", 3000


@dataclass(frozen=True, slots=True)
class Connection:
    """Everything a client needs for one server."""

    host: str
    base_url: str
    users: str  # who reaches base_url
    model: str
    names: tuple[str, ...]
    key_path: str
    read_key: str  # a command that prints the key
    tunnel: str | None  # a command that makes the host's own URL work from here
    ca: str | None  # a file that clients must trust
    container: str | None  # base URL inside containers of the host
    example: str
    context_tokens: int | None = None  # of the longest request; None: only the host knows


@dataclass(frozen=True, slots=True)
class Client:
    """One kind of client."""

    use: str  # what to do with the text, in one line; THIS: the command that printed it
    text: Callable[[Connection], Iterator[str]]


def _exports(**values: str) -> Iterator[str]:
    yield from (f"export {name}={shlex.quote(value)}" for name, value in values.items())


def _key(name: str, one: Connection) -> str:
    return f'export {name}="$({one.read_key})"'


def _env(one: Connection) -> Iterator[str]:
    yield from _exports(OPENAI_BASE_URL=one.base_url, OPENAI_MODEL=one.model)
    yield _key("OPENAI_API_KEY", one)
    if one.ca:
        yield from _exports(SSL_CERT_FILE=one.ca)


def _claude(one: Connection) -> Iterator[str]:
    yield from _exports(ANTHROPIC_BASE_URL=one.base_url.removesuffix("/v1"))
    yield _key("ANTHROPIC_AUTH_TOKEN", one)
    yield "unset ANTHROPIC_API_KEY"
    models = ("", "_DEFAULT_OPUS", "_DEFAULT_SONNET", "_DEFAULT_HAIKU")
    yield from _exports(
        **{f"ANTHROPIC{kind}_MODEL": one.model for kind in models},
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    if one.ca:
        yield from _exports(NODE_EXTRA_CA_CERTS=one.ca, SSL_CERT_FILE=one.ca)


def _curl(one: Connection) -> Iterator[str]:
    yield one.example


def _python(one: Connection) -> Iterator[str]:
    yield "import os, subprocess"
    if one.ca:
        yield f"os.environ['SSL_CERT_FILE'] = {one.ca!r}"
    yield "from openai import OpenAI"
    yield ""
    yield f"read_key = {shlex.split(one.read_key)!r}"
    yield "key = subprocess.check_output(read_key, text=True).strip()"
    yield f"client = OpenAI(base_url={one.base_url!r}, api_key=key)"
    yield "answer = client.chat.completions.create("
    yield f"    model={one.model!r},"
    yield f"    messages=[{{'role': 'user', 'content': {QUESTION!r}}}],"
    yield "    stream=True,"
    yield ")"
    yield "for piece in answer:"
    yield "    for choice in piece.choices:"
    yield "        print(choice.delta.content or '', end='', flush=True)"
    yield "print()"


_ANSWER_TOKENS = 32_000


def _opencode(one: Connection) -> Iterator[str]:
    # Without a limit opencode asks for answers of 32,000 tokens, which small contexts refuse.
    context = one.context_tokens or 0
    limit = {"limit": {"context": context, "output": min(_ANSWER_TOKENS, context // 4)}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": one.host,
        "options": {"baseURL": one.base_url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {name: {"name": name, **(limit if context else {})} for name in one.names},
    }
    schema = "https://opencode.ai/config.json"
    named = one.host.lstrip("@")
    config = {"$schema": schema, "model": f"{named}/{one.model}", "provider": {named: provider}}
    yield json.dumps(config, indent=2)


def _openwebui(one: Connection) -> Iterator[str]:
    yield _key("OPENAI_API_KEY", one)
    # The name alone: docker takes the value from its environment, not from its argv.
    words = ["docker", "run", "-d", "--name", "open-webui", "--network", "host"]
    # On this machine alone: its first visitor becomes its administrator, and it holds the key.
    words += ["-e", "HOST=127.0.0.1", "-e", f"PORT={_WEBUI_PORT}"]
    words += ["-e", f"OPENAI_API_BASE_URL={one.base_url}"]
    words += ["-e", "OPENAI_API_KEY", "-v", "open-webui:/app/backend/data"]
    if one.ca:
        inside = "/etc/ssl/spark-ca.pem"
        words += ["-v", f"{one.ca}:{inside}:ro", "-e", f"SSL_CERT_FILE={inside}"]
    yield shlex.join([*words, _WEBUI_IMAGE])


CLIENTS: dict[str, Client] = {
    "openwebui": Client(
        f"run these lines on Linux, then open http://127.0.0.1:{_WEBUI_PORT}", _openwebui
    ),
    "opencode": Client(
        "put it into opencode.json, and take the key with `--for env` before opencode starts",
        _opencode,
    ),
    "claude": Client('eval "$(THIS)"; claude', _claude),
    "python": Client("pip install openai; python FILE", _python),
    "curl": Client("run the line", _curl),
    "env": Client('eval "$(THIS)"', _env),
}
