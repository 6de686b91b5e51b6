"""How Open WebUI reads the output of `connect`, from the wheel (`make clients`.

PyPI, 106 MB). The whole program is several gigabytes, so only the statements that read the
environment run.
"""

import ast
import os
import subprocess
import sys
import zipfile
from typing import Any

import pytest

from spark_deploy.cli.clients import CLIENTS, Connection
from tests.open_webui import READS, VERSION

KEY = "sk-0123456789abcdef"
BASE_URL = "http://127.0.0.1:8000/v1"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    home = tmp_path_factory.mktemp("open-webui")
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    argv += ["--ignore-requires-python", "--dest", str(home), f"open-webui=={VERSION}"]
    subprocess.run(argv, check=True)
    [wheel] = home.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read("open_webui/config.py").decode()


def test_open_webui_reads_server_and_key_from_printed_variables(config, tmp_path, monkeypatch):
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    body = ast.parse(config).body
    first, end = (index_of(name, body) for name in ("OPENAI_API_KEY", "OPENAI_API_CONFIGS"))
    variables: dict[str, Any] = {"os": os}
    exec(compile(ast.Module(body[first:end], []), "config.py", "exec"), variables)
    assert variables["OPENAI_API_BASE_URLS"] == [BASE_URL]
    assert variables["OPENAI_API_KEYS"] == [KEY]


def test_open_webui_reads_every_documented_variable(config):
    for name in READS["config.py"]:
        assert f"os.getenv('{name}'" in config


def index_of(name, body):
    return next(
        index
        for index, node in enumerate(body)
        if isinstance(node, ast.Assign)
        and [ast.unparse(target) for target in node.targets] == [name]
    )


def environment(home):
    connection = Connection(
        "spark-1", BASE_URL, 8000, "here", "main-model", ("main-model",), "/etc/spark/api-key",
        f"echo {KEY}", None, None, None, "",
    )  # fmt: skip
    docker = home / "docker"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nenv\n')
    docker.chmod(0o755)
    result = subprocess.run(
        ["bash", "-euc", "\n".join(CLIENTS["openwebui"][1](connection))],
        capture_output=True, text=True, check=True, env={"PATH": f"{home}:/usr/bin:/bin"},
    )  # fmt: skip
    words = result.stdout.splitlines()
    values = dict(word.split("=", 1) for word in words if "=" in word)
    options = [words[index + 1] for index, word in enumerate(words) if word == "-e"]
    return {
        name: value or values[name]
        for name, _, value in (option.partition("=") for option in options)
    }
