"""``spark-deploy top``: samples, rates and the table."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from spark_deploy.cli import connect, live
from spark_deploy.cli.options import Options


def look(at: float, tokens: int, drafted: int = 0, accepted: int = 0) -> str:
    return (
        f"at {at}\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
        f'vllm:generation_tokens_total{{engine="0"}} {tokens}.0\n'
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}.0\n'
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        "memory 7000000\ngpu 61,48.2\nend\n"
    )


def rendered(rows: list[live.Now], columns: int) -> list[str]:
    console = Console(width=columns, file=io.StringIO())
    console.print(live.table(rows))
    return console.file.getvalue().splitlines()


def shown(text: str) -> list[str]:
    now = live.now_of("spark-1", list(live.parse_samples(text.splitlines())))
    return rendered([now], 100)[1].split()


def test_rates_compare_two_samples():
    cells = shown(look(10, 1000, 100, 80) + look(12, 1100, 200, 160))
    assert cells == ["spark-1", "2", "1", "50.0", "80%", "25%", "6.7", "61", "48"]


def test_a_restarted_engine_has_no_rate():
    assert shown(look(10, 1000) + look(12, 10))[3] == "-"


def test_a_host_without_an_engine_is_shown():
    text = "at 1\nmemory 7000000\ngpu [N/A],[N/A]\nend\n"
    assert shown(text) == ["spark-1", "-", "-", "-", "-", "-", "6.7", "-", "-"]


def test_an_incomplete_sample_is_skipped():
    assert list(live.parse_samples(look(1, 5).splitlines()[:-1])) == []


@pytest.mark.parametrize(("script", "code"), [("print(TEXT)", 0), ("raise SystemExit(255)", 1)])
def test_once_prints_one_sample_and_fails_without_an_answer(
    monkeypatch, tmp_path, capsys, script, code
):
    (tmp_path / "ssh").write_text(f"TEXT = {look(1, 5) + look(3, 25)!r}\n{script}\n")
    item = SimpleNamespace(name="a", data={"_sudo": False})
    monkeypatch.setattr(live, "select_hosts", lambda options, must_serve: [item])
    monkeypatch.setattr(live, "chosen_services", lambda host, service: ["main"])
    monkeypatch.setattr(connect, "ssh_command", lambda _: [sys.executable, str(tmp_path / "ssh")])
    assert live.top.callback.__wrapped__(Options(json=True), once=True, service=None) == code
    [result] = json.loads(capsys.readouterr().out)
    assert result["tokens_per_s"] == (10.0 if code == 0 else None)


def test_each_service_has_a_line(monkeypatch, tmp_path, capsys):
    commands = tmp_path / "commands"
    (tmp_path / "ssh").write_text(
        f"import sys; open({str(commands)!r}, 'a').write(sys.argv[-1]); print({look(1, 5)!r})\n"
    )
    item = SimpleNamespace(name="a", data={"_sudo": False})
    monkeypatch.setattr(live, "select_hosts", lambda options, must_serve: [item])
    monkeypatch.setattr(live, "chosen_services", lambda host, service: ["main", "embed"])
    monkeypatch.setattr(connect, "ssh_command", lambda _: [sys.executable, str(tmp_path / "ssh")])
    assert live.top.callback.__wrapped__(Options(json=True), once=True, service=None) == 0
    assert [now["host"] for now in json.loads(capsys.readouterr().out)] == ["a", "a/embed"]
    for folder in ("engines/main/engine.sock", "engines/embed/engine.sock"):
        assert folder in commands.read_text()


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_lines_fit_the_screen(columns: int) -> None:
    names = ["spark-kitchen-1.lan", "spark-kitchen-2.lan", "spark-of-the-cellar.home.example"]
    lines = rendered([live.now_of(name, []) for name in names], columns)
    assert max(map(len, lines)) <= columns
    assert [line.split()[0] for line in lines[1:3]] == names[:2]
    assert len(lines) == 4
