"""Journals of several hosts become one stream by time, readable, and never wait for each other."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from spark_deploy.cli import connect, logs
from spark_deploy.cli.options import Options


def entry(at_us: int, unit: str, text: object) -> str:
    return json.dumps({"__REALTIME_TIMESTAMP": str(at_us), "_SYSTEMD_UNIT": unit, "MESSAGE": text})


def test_lines_are_named_by_what_printed_them_and_half_ones_are_left_out():
    text = [
        entry(1, "spark-serve@main-0.service", "loading"),
        entry(2, "spark-gateway@main.service", [104, 105]),
        json.dumps({"__REALTIME_TIMESTAMP": "3", "UNIT": "spark-job@1.service", "MESSAGE": "done"}),
        '{"__REALTIME_TI',
    ]
    found = [(line.part, line.text) for line in logs.read_lines("a", text)]
    assert found == [("engine", "loading"), ("gateway", "hi"), ("job", "done")]


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    """Two hosts whose ssh prints a journal that was written down; the first one is slow."""
    for name, wait, times in (("a", 0.3, (1, 4)), ("b", 0, (2, 3))):
        lines = "\n".join(entry(at, "spark-serve@x.service", f"{name}{at}") for at in times)
        (tmp_path / name).write_text(f"import time; time.sleep({wait}); print({lines!r})\n")
    data = {"_sudo": False}
    listed = [SimpleNamespace(name=name, data=data) for name in ("a", "b")]
    monkeypatch.setattr(logs, "select_hosts", lambda options, judged: listed)
    monkeypatch.setattr(
        connect, "ssh_command", lambda one: [sys.executable, str(tmp_path / one.name)]
    )
    return tmp_path


def run() -> int:
    return int(logs.logs.callback.__wrapped__(Options(json=True), lines=9, follow=False))


@pytest.mark.usefixtures("hosts")
def test_hosts_are_merged_by_time(capsys):
    assert run() == 0
    told = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert told == ["a1", "b2", "b3", "a4"]


def test_a_host_that_cannot_be_read_is_named_and_the_others_are_shown(hosts, capsys):
    (hosts / "a").write_text("raise SystemExit(255)")
    assert run() == 1
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2
    assert said.err.startswith("a: journal unreadable")


def test_following_asks_for_lines_as_they_come():
    assert " -f " in logs.journal_command(5, follow=True)
    assert " -f " not in logs.journal_command(5, follow=False)
    assert "-u 'spark-serve@*.service'" in logs.journal_command(5, follow=False)
