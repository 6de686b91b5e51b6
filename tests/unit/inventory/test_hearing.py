"""What hosts print reaches neither the operator's terminal raw, nor memory without end."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyinfra.connectors import util

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SparkError
from spark_deploy.config.printable import heard, shown
from spark_deploy.inventory import output_limits

OWNED = b"\x1b]0;owned\x07\x1b[2J\x1b[1Afine\xff\x9b31m\r{}"
PRINTED = "".join(f"\\{byte:03o}" for byte in OWNED)
PRINTING = f"printf '{PRINTED}\\n'"
HARMLESS = st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.sampled_from("äé漢😀\t"))


def moves_a_terminal(text: str) -> bool:
    return any(
        (ord(sign) < 32 and sign not in "\n\t") or 127 <= ord(sign) < 160 or sign in "\u202e\u2066"
        for sign in text
    )


@given(st.text())
@example("a\x1b[2Jb")
@example("\u202egnp.exe")
def test_nothing_that_is_shown_moves_a_terminal(text: str) -> None:
    assert not moves_a_terminal(shown(text))


@given(st.text(), st.booleans())
@example("\x1b[2J", True)
@example("\\\x1b", True)
@example("\\b", True)
@example("a\b\b\rb\f", True)
@example("\u009b31m", False)
def test_nor_does_what_json_brings_back(text: str, ascii_only: bool) -> None:
    line = heard(json.dumps({"a": text, "b": 1}, ensure_ascii=ascii_only))
    found = json.loads(line)
    assert found["b"] == 1
    assert not moves_a_terminal(found["a"])


@given(HARMLESS)
@example("\\u001b is how it is written")
@example(r"C:\b\f\r \\u001b")
@example("line one\nline two\ttabbed 😀")
def test_plain_words_come_through_as_they_are(text: str) -> None:
    assert shown(text) == text
    assert json.loads(heard(json.dumps(text))) == text


@pytest.mark.slow
def test_with_v_pyinfra_shows_text_of_a_host_and_no_command_to_the_terminal(
    tmp_path: Path,
) -> None:
    (tmp_path / "inventory.py").write_text(
        f"import sys as _sys; _sys.path.insert(0, {str(CHECKOUT)!r})\n"
        "from spark_deploy.inventory.groups import group_from as _group_from\n"
        'here = _group_from("here", hosts=["@local"], file=__file__)\n'
    )
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/here.yml").write_text("sudo: false\n")
    (tmp_path / "deploy.py").write_text(
        f"from pyinfra.operations import server\nserver.shell(commands=[{PRINTING!r}])\n"
    )
    words = [sys.executable, "-m", "pyinfra", "-y", "-vvv"]
    theirs = subprocess.run([*words, "@local", "deploy.py"], cwd=tmp_path, capture_output=True)
    ours = subprocess.run([*words, "inventory.py", "deploy.py"], cwd=tmp_path, capture_output=True)
    assert ours.returncode == 0, ours.stderr
    assert b"fine" in ours.stderr
    for command in (b"\x1b]0;", b"\x1b[2J", b"\x1b[1A", b"\xff", b"\x9b31m"):
        assert command not in ours.stdout + ours.stderr, command
    # What this is about: without it they are there, or the reading ends with a traceback.
    assert b"\x1b]0;" in theirs.stderr or b"UnicodeDecodeError" in theirs.stderr


def read(stream: Any) -> list[str]:
    queue: Queue[util.OutputLine] = Queue()
    output_limits.read_buffer("stdout", stream, queue)
    return [line.line for line in queue.queue]


def test_a_host_that_prints_without_end_is_listened_to_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_limits, "MOST_BYTES", 10_000)
    monkeypatch.setattr(output_limits, "_LINE_BYTES", 1_000)
    with subprocess.Popen(["yes", "x" * 99], stdout=subprocess.PIPE) as endless:
        lines = read(endless.stdout)
        assert endless.wait(timeout=10) != 0  # nobody reads on
    assert len(lines) == 101
    assert "more than anybody asked for" in lines[-1]
    one_line = io.BytesIO(b"x" * 1_000_000)
    assert sum(map(len, read(one_line))) < 11_000


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(output_limits, "echo", lambda text, err: told.append(text))
    return told


@pytest.mark.parametrize("said", [b"x" * 3_000_000, b"y\n" * 700_000])
def test_a_flood_of_a_host_is_no_flood_of_the_operators_terminal(
    said: bytes, terminal: list[str]
) -> None:
    queue: Queue[util.OutputLine] = Queue()
    output_limits.read_buffer(
        "stdout", io.BytesIO(said), queue, True, lambda line: f"[host] {line}"
    )
    assert sum(len(line.removeprefix("[host] ")) + 1 for line in terminal) < 1_100_000
    assert "the host printed more" in terminal[-1]
    assert sum(len(line.line) + 1 for line in queue.queue) >= len(said)  # what is read stays whole


def test_what_hosts_say_every_day_is_shown_whole(terminal: list[str]) -> None:
    said = [f"Unpacking package {number} ... " + "=" * 100 for number in range(2_000)]
    output_limits.read_buffer("stdout", io.BytesIO("\n".join(said).encode()), Queue(), True)
    assert terminal == said


class Hostile(paramiko.ServerInterface):
    def check_auth_none(self, username: str) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "none"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: Any, command: bytes) -> bool:
        def talk() -> None:
            channel.sendall(b"before\n" + OWNED + b"\nafter\n")
            channel.sendall_stderr(OWNED + b"\n")
            channel.send_exit_status(0)
            channel.close()

        threading.Timer(0.2, talk).start()  # the request is answered first
        return True


@pytest.fixture
def client() -> Iterator[paramiko.Transport]:
    ours, theirs = socket.socketpair()
    server = paramiko.Transport(theirs)
    server.add_server_key(paramiko.ECDSAKey.generate())
    server.start_server(event=threading.Event(), server=Hostile())
    transport = paramiko.Transport(ours)
    transport.start_client(timeout=20)
    transport.auth_none("ann")
    yield transport
    transport.close()
    server.close()


def test_over_ssh_the_lines_behind_bytes_that_are_no_text_arrive(
    client: paramiko.Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(util, "read_buffer", output_limits.read_buffer)
    channel = client.open_session(timeout=20)
    channel.exec_command("anything")
    output = util.read_output_buffers(
        channel.makefile("r"), channel.makefile_stderr("r"), 20, False, ""
    )
    assert output.stdout_lines[0] == "before"
    assert output.stdout_lines[-1] == "after"
    assert len(output.stdout_lines) == 3
    assert "fine" in output.stderr_lines[0]
    assert not any(map(moves_a_terminal, output.output_lines))
    assert os.linesep not in output.stdout_lines[1]


def test_pyinfra_fails_instead_of_prompting_for_a_sudo_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(util, "getpass", lambda _: "typed")
    monkeypatch.setattr(util, "read_buffer", util.read_buffer)
    output_limits.listen_carefully()
    host: Any = SimpleNamespace(print_prefix="", connector_data={})
    refused = util.CommandOutput([util.OutputLine("stderr", util.SUDO_PASSWORD_REQUIRED_LINES[0])])
    with pytest.raises(SparkError, match=r"deploys/bootstrap\.py"):
        util.execute_command_with_sudo_retry(host, {}, lambda: (1, refused))
    assert host.connector_data == {}
