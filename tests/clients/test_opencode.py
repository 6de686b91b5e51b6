"""opencode and Claude Code with the output of `connect` and a real gateway (`make clients`)."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.labkit import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "tests/unit/host_tools"))

from gateway_client import running_gateway

from spark_deploy.cli.clients import CLIENTS, Connection

pytest_plugins = ["tests.unit.host_tools.conftest"]
OPENCODE, CLAUDE_CODE = "opencode-ai@1.18.33", "@anthropic-ai/claude-code@2.1.328"
QUESTION, ANSWER = "What is 7823 * 4519?", "35352137"


@pytest.fixture
def connection(nginx_host):
    host = nginx_host
    host.started(host.release(), STUB_FAULT="no-tool")
    with running_gateway(host, engine=False, max_body_bytes=1 << 22) as client:
        key = host.paths.below(client.settings.key_path)
        yield Connection(
            "spark-1", f"http://127.0.0.1:{client.settings.port}/v1", client.settings.port,
            "this host", "main-model", ("main-model",), str(key), f"cat '{key}'",
            None, None, None, "", 16_384,
        )  # fmt: skip


@pytest.fixture(scope="session")
def npm(tmp_path_factory):
    home, program = tmp_path_factory.mktemp("npm"), shutil.which("npm")
    assert program, "needs npm: apt-get install npm"

    def install(package):
        arguments = [program, "install", "--no-audit", "--no-fund", package]
        subprocess.run(arguments, cwd=home, check=True, capture_output=True)
        return home / "node_modules/.bin"

    return install


def run_shell(script, *args, home):
    result = subprocess.run(
        ["bash", "-euc", f'{script}\nexec "$0" "$@"', *args], cwd=home, timeout=180, check=False,
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def client_text(client, connection):
    return "\n".join(CLIENTS[client][1](connection))


def test_opencode_gets_an_answer_with_the_printed_configuration(npm, connection, tmp_path):
    opencode = npm(OPENCODE) / "opencode"
    (tmp_path / "opencode.json").write_text(client_text("opencode", connection))
    output = run_shell(
        client_text("env", connection), str(opencode), "run", QUESTION, home=tmp_path
    )
    assert ANSWER in output


def test_claude_code_gets_an_answer_with_the_printed_environment(npm, connection, tmp_path):
    claude = npm(CLAUDE_CODE) / "claude"
    output = run_shell(
        client_text("claude", connection), str(claude), "-p", QUESTION, home=tmp_path
    )
    assert ANSWER in output
