"""Output at every width of the terminal."""

import contextlib
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from spark_deploy.cli import main
from spark_deploy.cli.terminal import print_wrapped, styled, wrap_line
from spark_deploy.config.checkout import CHECKOUT

WORDS = st.lists(st.text("abcdef.,-/", min_size=1, max_size=12), min_size=1, max_size=40)


@given(WORDS, st.sampled_from([80, 100, 160]), st.sampled_from(["", "  serves      ", "host: "]))
def test_a_wrapped_line_keeps_every_word_within_the_width(words, width, title):
    line = title + " ".join(words)
    result = wrap_line(line, width)
    assert " ".join(result).split() == line.split()
    assert max(map(len, result)) <= width


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_wrapped_plan_keeps_the_columns(width, capsys):
    assert main(["plan", "--estimate"]) == 0
    text = capsys.readouterr().out
    out = io.StringIO()
    print_wrapped(text.splitlines(), Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split() == text.split()
    follow_up = [line for line in lines if line.startswith("   ")]
    assert all(line.startswith(" " * 14) for line in follow_up)


def test_a_long_word_is_not_split():
    assert wrap_line(f"  engine  {'x' * 90} --flag", 80)[-2:] == [f"  engine  {'x' * 90}",
                                                              "          --flag"]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "word"),
    [("  REFUSED   disk: full", "REFUSED"), ("  WARNING     odd", "WARNING")],
)
def test_problems_are_highlighted(line, word):
    [span] = styled(line).spans
    assert line[span.start : span.end] == word
    assert "bold" in str(span.style)


def test_units_and_arguments_need_verbose(capsys):
    assert main(["plan", "--estimate"]) == 0
    brief = capsys.readouterr().out
    assert main(["plan", "--estimate", "--verbose"]) == 0
    whole = capsys.readouterr().out
    first, second = brief.splitlines()[:2]
    assert first == "spark-1: qwen3.5-122b with v2 fits"
    assert "http://127.0.0.1:8000/v1" in second
    assert "min at 100 MB/s" in brief
    for part in ("vllm serve", "spark-serve@", "StartLimitBurst"):
        assert part in whole
        assert part not in brief


def test_the_plan_of_a_cluster_sends_clients_to_the_head(tmp_path, capsys):
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/spark.yml").write_text(
        "model: qwen3.5-122b\ncluster: {hosts: [spark-1, spark-2]}\n"
    )
    inventory = tmp_path / "sparks.py"
    inventory.write_text("spark = ['spark-1', 'spark-2']\n")
    assert main(["plan", str(inventory), "--estimate"]) == 0
    head, worker = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("  serves ")
    )
    assert "at http://127.0.0.1:8000/v1 (the host itself), together with spark-2" in head
    assert worker.endswith("qwen3.5-122b together with spark-1, which answers clients")


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_wrapped_command_can_be_copied(width, tmp_path, monkeypatch, capsys):
    """Lines continue after a backslash, never inside quotes."""
    (tmp_path / "sparks.py").write_text("spark = ['spark-1.of-a-long-domain.example']\n")
    monkeypatch.chdir(tmp_path)
    assert main(["connect", "--inventory", "sparks.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    typed = [line[13:] for line in lines if line[13:].startswith(("ssh ", "curl "))]
    assert len(typed) == 3
    for line in lines:
        if line[13:] not in typed:
            continue
        shown = [item[13:] for item in wrap_line(line, width)]
        assert all(item.endswith(" \\") for item in shown[:-1])
        as_a_shell_reads = "\n".join(shown).replace("\\\n", "")
        assert shlex.split(as_a_shell_reads) == shlex.split(line[13:])
        whole = [word for word in shown if len(word) > width - 13]
        assert all("'" in word for word in whole)


@pytest.mark.parametrize(
    "width", [80, *(pytest.param(n, marks=pytest.mark.slow) for n in (100, 160))]
)
def test_an_error_message_fits_the_terminal(width, tmp_path):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    words = [sys.executable, "-m", "spark_deploy", "plan", "--model", "qwen3.5-397b"]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "TERM": "xterm", "NO_COLOR": "1"}
    inventory = str(CHECKOUT / "inventory/spark.py")
    with subprocess.Popen([*words, inventory], cwd=tmp_path, stderr=slave, env=env) as process:
        os.close(slave)
        text = b""
        with contextlib.suppress(OSError):  # the end of the output
            while extra := os.read(master, 1 << 16):
                text += extra
    os.close(master)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.decode()).splitlines()
    assert process.returncode == 1
    assert "does not fit on one host" in " ".join(line.strip() for line in lines)
    assert max(map(len, lines)) <= width
