"""The output of `connect`, used by a shell and by real clients of a real gateway."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from stub_gateway import Door

from spark_deploy.cli.connect import CLIENTS, QUESTION, Connection
from tests.open_webui import READS

ANSWER = "35352137"


@pytest.fixture
def connection(gate: Door, tmp_path: Path) -> Connection:
    key = gate.host.paths.below(gate.settings.key_path)
    return Connection(
        host="spark-1",
        base_url=f"http://127.0.0.1:{gate.settings.port}/v1",
        users="this host",
        model="main-model",
        names=("main-model", "other"),
        key_path=str(key),
        read_key=f"cat '{key}'",
        tunnel=None,
        ca=None,
        container=None,
        example="",
        context_tokens=8192,
    )


def text_of(client: str, connection: Connection) -> str:
    return "\n".join(CLIENTS[client].text(connection))


def run_after(client: str, connection: Connection, program: str) -> str:
    done = subprocess.run(
        ["bash", "-euc", f'eval "$1"; {sys.executable} -c "$2"', "-",
         text_of(client, connection), program],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_client_examples_never_contain_the_key(connection: Connection, gate: Door) -> None:
    for client in CLIENTS:
        assert gate.key not in text_of(client, connection), client


@pytest.mark.slow
def test_python_example_works(connection: Connection, tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(text_of("python", connection))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, env={}
    )
    assert (done.returncode, done.stdout.strip()) == (0, ANSWER), done.stderr


@pytest.mark.slow
def test_openai_client_works_from_the_environment(connection: Connection) -> None:
    program = f"""
import os
from openai import OpenAI
asked = OpenAI().chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=[{{"role": "user", "content": "{QUESTION}"}}])
print(asked.choices[0].message.content)
"""
    assert run_after("env", connection, program).strip() == ANSWER


@pytest.mark.slow
def test_anthropic_client_works_from_the_environment(connection: Connection) -> None:
    program = f"""
import os
from anthropic import Anthropic
client, asked = Anthropic(), [{{"role": "user", "content": "{QUESTION}"}}]
model = os.environ["ANTHROPIC_MODEL"]
whole = client.messages.create(model=model, max_tokens=100, messages=asked)
print(whole.content[0].text, whole.usage.output_tokens > 0)
with client.messages.stream(model=model, max_tokens=100, messages=asked) as stream:
    print("".join(stream.text_stream))
"""
    assert run_after("claude", connection, program).split() == [ANSWER, "True", ANSWER]


def test_openai_client_streams(connection: Connection, gate: Door) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=connection.base_url, api_key=gate.key)
    assert [model.id for model in client.models.list()] == ["main-model", "alias"]
    asked = [{"role": "user", "content": QUESTION}]
    pieces = client.chat.completions.create(
        model="main-model", messages=asked, stream=True,  # type: ignore[arg-type]
        stream_options={"include_usage": True},
    )  # fmt: skip
    seen = list(pieces)
    text = "".join(c.delta.content or "" for piece in seen for c in piece.choices)
    assert text == ANSWER
    assert seen[-1].usage.completion_tokens > 0


@pytest.mark.slow
def test_clients_raise_authentication_errors(connection: Connection) -> None:
    import anthropic
    import openai

    asked = [{"role": "user", "content": "?"}]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=connection.base_url, api_key="wrong").chat.completions.create(
            model="main-model", messages=asked
        )  # type: ignore[call-overload]
    root = connection.base_url.removesuffix("/v1")
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=root, api_key="wrong").messages.create(
            model="main-model", messages=asked, max_tokens=5
        )


def test_curl_example_works(connection: Connection) -> None:
    from spark_deploy.cli.connect import example

    line = example(connection.base_url, connection.model, connection.read_key, None)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert ANSWER in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_opencode_example_lists_every_name(
    connection: Connection,
) -> None:
    config = json.loads(text_of("opencode", connection))
    assert config["model"] == "spark-1/main-model"
    provider = config["provider"]["spark-1"]
    assert list(provider["models"]) == ["main-model", "other"]
    assert provider["models"]["other"]["limit"] == {"context": 8192, "output": 2048}
    assert provider["options"]["baseURL"] == connection.base_url
    assert provider["options"]["apiKey"] == "{env:OPENAI_API_KEY}"


def test_open_webui_gets_the_key_from_the_environment(
    connection: Connection, tmp_path: Path, gate: Door
) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "environment: $OPENAI_API_KEY"\n')
    docker.chmod(0o755)
    done = subprocess.run(
        ["bash", "-euc", text_of("openwebui", connection)],
        capture_output=True, text=True, check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    *argv, environment = done.stdout.splitlines()
    assert environment == f"environment: {gate.key}"
    assert gate.key not in " ".join(argv)
    assert f"OPENAI_API_BASE_URL={connection.base_url}" in argv
    assert argv[argv.index("OPENAI_API_KEY") - 1] == "-e"


def test_open_webui_example_uses_known_variables_and_loopback(
    connection: Connection,
) -> None:
    for ca in (None, "/home/me/ca.pem"):
        argv = shlex.split(text_of("openwebui", replace(connection, ca=ca)).splitlines()[1])
        given = dict(
            argv[place + 1].partition("=")[::2] for place, word in enumerate(argv) if word == "-e"
        )
        assert set(given) <= {name for names in READS.values() for name in names}
        assert (given["HOST"], given["PORT"]) == ("127.0.0.1", "3000")
