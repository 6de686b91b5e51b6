"""``spark-deploy logs``: journals of several hosts, merged by time."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from spark_deploy.cli import connect, live
from spark_deploy.cli.options import Options


def entry(at_us: int, unit: str, text: object) -> str:
    return json.dumps({"__REALTIME_TIMESTAMP": str(at_us), "_SYSTEMD_UNIT": unit, "MESSAGE": text})


def test_lines_name_the_unit_and_incomplete_lines_are_skipped():
    text = [
        entry(1, "spark-serve@main-0.service", "loading"),
        entry(2, "spark-gateway@main.service", [104, 105]),
        json.dumps({"__REALTIME_TIMESTAMP": "3", "UNIT": "spark-job@1.service", "MESSAGE": "done"}),
        '{"__REALTIME_TI',
    ]
    result = [(line.part, line.text) for line in live.parse_journal("a", text)]
    assert result == [("engine", "loading"), ("gateway", "hi"), ("job", "done")]


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    """Two hosts with recorded journals; the first is slow."""
    for name, wait, times in (("a", 0.3, (1, 4)), ("b", 0, (2, 3))):
        lines = "\n".join(entry(at, "spark-serve@x.service", f"{name}{at}") for at in times)
        (tmp_path / name).write_text(f"import time; time.sleep({wait}); print({lines!r})\n")
    data = {"_sudo": False}
    listed = [SimpleNamespace(name=name, data=data) for name in ("a", "b")]
    monkeypatch.setattr(live, "select_hosts", lambda options, must_serve: listed)
    monkeypatch.setattr(
        connect, "ssh_command", lambda item: [sys.executable, str(tmp_path / item.name)]
    )
    return tmp_path


def run() -> int:
    return int(live.logs.callback.__wrapped__(Options(json=True), lines=9, follow=False))


@pytest.mark.usefixtures("hosts")
def test_hosts_are_merged_by_time(capsys):
    assert run() == 0
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert texts == ["a1", "b2", "b3", "a4"]


def test_an_unreadable_journal_is_reported(hosts, capsys):
    (hosts / "a").write_text("raise SystemExit(255)")
    assert run() == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2
    assert captured.err.startswith("a: journal unreadable")


def test_the_journal_command_follows_on_request():
    assert " -f " in live.journal_command(5, follow=True)
    assert " -f " not in live.journal_command(5, follow=False)
    assert "-u 'spark-serve@*.service'" in live.journal_command(5, follow=False)
