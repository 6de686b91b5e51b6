import io
import json
import os
import subprocess
import sys
from queue import Queue
from types import SimpleNamespace
from typing import Any

import gevent
import paramiko
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyinfra.connectors import util

from spark_deploy.config.errors import SparkError, printable, printable_output
from spark_deploy.inventory import connections
from tests.unit.cli.ssh_server import Host, serving

ESCAPES = b"\x1b]0;owned\x07\x1b[2J\x1b[1Afine\xff\x9b31m\r{}"
PRINT_ESCAPES = "printf '" + "".join(f"\\{byte:03o}" for byte in ESCAPES) + "\\n'"
HARMLESS = st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.sampled_from("äé漢😀\t"))


def controls_terminal(text):
    return any(
        (ord(sign) < 32 and sign not in "\n\t") or 127 <= ord(sign) < 160 or sign in "\u202e\u2066"
        for sign in text
    )


@given(HARMLESS)
@example("\\u001b is how it is written")
@example(r"C:\b\f\r \\u001b")
@example("line one\nline two\ttabbed 😀")
def test_plain_text_is_unchanged(text):
    assert printable(text) == text
    assert json.loads(printable_output(json.dumps(text))) == text


@given(st.text())
@example("a\x1b[2Jb")
@example("\u202egnp.exe")
def test_printable_text_has_no_control_characters(text):
    assert not controls_terminal(printable(text))


@given(st.text(), st.booleans())
@example("\x1b[2J", True)
@example("\\\x1b", True)
@example("\\b", True)
@example("a\b\b\rb\f", True)
@example("\u009b31m", False)
def test_parsed_json_never_has_control_characters(text, ascii_only):
    line = printable_output(json.dumps({"a": text, "b": 1}, ensure_ascii=ascii_only))
    data = json.loads(line)
    assert data["b"] == 1
    assert not controls_terminal(data["a"])


@pytest.mark.slow
def test_pyinfra_verbose_mode_never_prints_escape_sequences(repository):
    repository.list_hosts('["@local"]')
    repository.write("deploy.py", "from pyinfra.operations import server\n"
              f"server.shell(commands=[{PRINT_ESCAPES!r}])\n")  # fmt: skip
    words = [sys.executable, "-m", "pyinfra", "-y", "-vvv"]
    outputs = [
        subprocess.run([*words, inventory, "deploy.py"], cwd=repository.root, capture_output=True)
        for inventory in ("@local", "sparks.py")
    ]
    plain, limited = outputs
    assert limited.returncode == 0, limited.stderr
    assert b"fine" in limited.stderr
    for command in (b"\x1b]0;", b"\x1b[2J", b"\x1b[1A", b"\xff", b"\x9b31m"):
        assert command not in limited.stdout + limited.stderr, command
    # Without our module they are printed, or reading ends with a traceback.
    assert b"\x1b]0;" in plain.stderr or b"UnicodeDecodeError" in plain.stderr


def read(stream, *, print_output=False):
    queue: Queue[util.OutputLine] = Queue()
    connections.read_buffer("stdout", stream, queue, print_output, lambda line: f"[host] {line}")
    return [line.line for line in queue.queue]


def test_stops_reading_endless_output(monkeypatch):
    monkeypatch.setattr(connections, "MAX_BYTES", 10_000)
    monkeypatch.setattr(connections, "_LINE_BYTES", 1_000)
    with subprocess.Popen(["yes", "x" * 99], stdout=subprocess.PIPE) as endless:
        lines = read(endless.stdout)
        assert endless.wait(timeout=10) != 0
    assert len(lines) == 101
    assert "exceeds the limit" in lines[-1]
    one_line = io.BytesIO(b"x" * 1_000_000)
    assert sum(map(len, read(one_line))) < 11_000


def test_endless_empty_lines_do_not_stop_other_greenlets(monkeypatch):
    monkeypatch.setattr(connections, "_MAX_LINES", 20_000)
    turns = []

    def count():
        while True:
            turns.append(1)
            gevent.sleep(0)

    other = gevent.spawn(count)
    lines = read(io.BytesIO(b"\n" * 100_000))
    other.kill()
    assert "exceeds the limit" in lines[-1]
    assert len(lines) <= 20_001
    assert len(turns) >= 10


@pytest.fixture
def printed(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(
        connections, "echo", lambda text, err: lines.append(text.removeprefix("[host] "))
    )
    return lines


@pytest.mark.parametrize("output", [b"x" * 3_000_000, b"y\n" * 70_000])
def test_limits_printed_output(output, printed, monkeypatch):
    monkeypatch.setattr(connections, "_MAX_PRINTED_PER_STREAM", 100_000)
    lines = read(io.BytesIO(output), print_output=True)
    assert sum(len(line) + 1 for line in printed) < 105_000
    assert "output truncated" in printed[-1]
    assert sum(len(line) + 1 for line in lines) >= len(output)


def test_prints_ordinary_output_completely(printed):
    lines = [f"Unpacking package {number} ... " + "=" * 100 for number in range(2_000)]
    read(io.BytesIO("\n".join(lines).encode()), print_output=True)
    assert printed == lines


def test_reads_ssh_output_after_invalid_utf8(tmp_path, monkeypatch):
    monkeypatch.setattr(util, "read_buffer", connections.read_buffer)
    (tmp_path / "out").write_bytes(b"before\n" + ESCAPES + b"\nafter\n")
    (tmp_path / "err").write_bytes(ESCAPES + b"\n")
    with serving(Host(password="right")) as host:
        transport = paramiko.Transport(("127.0.0.1", host.port))
        transport.connect(username="ann", password="right")
        channel = transport.open_session(timeout=20)
        channel.exec_command(f"cat {tmp_path}/out; cat {tmp_path}/err >&2")
        streams = channel.makefile("r"), channel.makefile_stderr("r")
        output = util.read_output_buffers(*streams, 20, False, "")
        transport.close()
    assert output.stdout_lines[0] == "before"
    assert output.stdout_lines[-1] == "after"
    assert len(output.stdout_lines) == 3
    assert "fine" in output.stderr_lines[0]
    assert not any(map(controls_terminal, output.output_lines))
    assert os.linesep not in output.stdout_lines[1]


def test_pyinfra_never_prompts_for_a_sudo_password(monkeypatch):
    monkeypatch.setattr(util, "getpass", lambda _: "typed")
    monkeypatch.setattr(util, "read_buffer", util.read_buffer)
    connections.patch_pyinfra()
    host: Any = SimpleNamespace(print_prefix="", connector_data={})
    refused = util.CommandOutput([util.OutputLine("stderr", util.SUDO_PASSWORD_REQUIRED_LINES[0])])
    with pytest.raises(SparkError, match=r"deploys/bootstrap\.py"):
        util.execute_command_with_sudo_retry(host, {}, lambda: (1, refused))
    assert host.connector_data == {}
