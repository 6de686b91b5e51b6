import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from stub_host import write_program

from spark_deploy.cli.clients import CLIENTS, QUESTION, Connection, example
from tests.open_webui import READS

ANSWER = "35352137"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def connection(client):
    key = client.host.paths.below(client.settings.key_path)
    return Connection(
        host="spark-1", base_url=f"http://127.0.0.1:{client.settings.port}/v1", users="this host",
        port=client.settings.port, model="main-model", names=("main-model", "other"),
        key_path=str(key), read_key=f"cat '{key}'", tunnel=None, ca=None, container=None,
        example="", context_tokens=8192,
    )  # fmt: skip


def example_of(name, connection):
    return "\n".join(CLIENTS[name][1](connection))


def run_with_environment(name, connection, program):
    done = subprocess.run(
        ["bash", "-euc", f'eval "$1"; {sys.executable} -c "$2"', "-",
         example_of(name, connection), program],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_client_examples_do_not_contain_the_key(connection, client):
    assert [name for name in CLIENTS if client.key in example_of(name, connection)] == []


@pytest.mark.slow
def test_python_example_gets_an_answer(connection, tmp_path):
    script = tmp_path / "ask.py"
    script.write_text(example_of("python", connection))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, env={}
    )
    assert (done.returncode, done.stdout.strip()) == (0, ANSWER), done.stderr


@pytest.mark.slow
def test_openai_client_is_configured_by_environment_variables(connection):
    program = f"""
import os
from openai import OpenAI
answer = OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages={MESSAGES})
print(answer.choices[0].message.content)
"""
    assert run_with_environment("env", connection, program).strip() == ANSWER


@pytest.mark.slow
def test_anthropic_client_is_configured_by_environment_variables(connection):
    program = f"""
import os
from anthropic import Anthropic
client, question = Anthropic(), dict(
    model=os.environ["ANTHROPIC_MODEL"], max_tokens=100, messages={MESSAGES})
answer = client.messages.create(**question)
print(answer.content[0].text, answer.usage.output_tokens > 0)
with client.messages.stream(**question) as stream:
    print("".join(stream.text_stream))
"""
    words = run_with_environment("claude", connection, program).split()
    assert words == [ANSWER, "True", ANSWER]


def test_curl_example_gets_an_answer(connection):
    command = example(connection.base_url, connection.model, connection.read_key, None)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert ANSWER in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_opencode_example_lists_every_model_name(connection):
    config = json.loads(example_of("opencode", connection))
    assert config["model"] == "spark-1/main-model"
    provider = config["provider"]["spark-1"]
    assert list(provider["models"]) == ["main-model", "other"]
    assert provider["models"]["other"]["limit"] == {"context": 8192, "output": 2048}
    assert provider["options"]["baseURL"] == connection.base_url
    assert provider["options"]["apiKey"] == "{env:OPENAI_API_KEY}"


def test_open_webui_gets_the_key_from_the_environment(connection, tmp_path, client):
    script = 'printf "%s\\n" "$@" "environment: $OPENAI_API_KEY"'
    write_program(tmp_path / "docker", script)
    done = subprocess.run(
        ["bash", "-euc", example_of("openwebui", connection)],
        capture_output=True, text=True, check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    *argv, environment = done.stdout.splitlines()
    assert environment == f"environment: {client.key}"
    assert client.key not in " ".join(argv)
    assert f"OPENAI_API_BASE_URL={connection.base_url}" in argv
    assert argv[argv.index("OPENAI_API_KEY") - 1] == "-e"


@pytest.mark.parametrize("ca", [None, "/home/me/ca.pem"])
def test_open_webui_example_uses_known_variables_and_loopback(connection, ca):
    argv = shlex.split(example_of("openwebui", replace(connection, ca=ca)).splitlines()[1])
    options = [argv[index + 1] for index, word in enumerate(argv) if word == "-e"]
    variables = dict(option.partition("=")[::2] for option in options)
    assert set(variables) <= {name for names in READS.values() for name in names}
    assert (variables["HOST"], variables["PORT"]) == ("127.0.0.1", "3000")
