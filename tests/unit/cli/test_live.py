import io
import json
import shutil
import socket
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from spark_deploy.cli import connect, live
from spark_deploy.cli.console import Options
from spark_deploy.config.errors import SparkError


@pytest.fixture
def ssh(monkeypatch, tmp_path):
    def install(**scripts):
        for name, script in scripts.items():
            (tmp_path / name).write_text(script)
        hosts = [SimpleNamespace(name=name, data={"_sudo": False}) for name in scripts]
        monkeypatch.setattr(live, "select_hosts", lambda options, must_serve: hosts)
        monkeypatch.setattr(live, "selected_services", lambda host, service: service or ["main"])
        monkeypatch.setattr(
            connect,
            "ssh_command",
            lambda host, *options: [sys.executable, str(tmp_path / host.name)],
        )

    return install


def entry(at_us, unit, text):
    return json.dumps({"__REALTIME_TIMESTAMP": str(at_us), "_SYSTEMD_UNIT": unit, "MESSAGE": text})


def test_log_lines_start_with_their_unit():
    text = [
        entry(1, "spark-serve@main-0.service", "loading"),
        entry(2, "spark-gateway@main.service", [104, 105]),
        json.dumps({"__REALTIME_TIMESTAMP": "3", "UNIT": "spark-job@1.service", "MESSAGE": "done"}),
        '{"__REALTIME_TI',
    ]
    lines = [(line.part, line.text) for line in live.parse_journal("a", text)]
    assert lines == [("engine", "loading"), ("gateway", "hi"), ("job", "done")]


@pytest.mark.parametrize("readable", [True, False])
def test_host_logs_are_merged_by_time_and_failures_are_reported(ssh, capsys, readable):
    scripts = {}
    for name, wait_s, times in (("a", 0.3, (1, 4)), ("b", 0, (2, 3))):
        lines = "\n".join(entry(at, "spark-serve@x.service", f"{name}{at}") for at in times)
        scripts[name] = f"import time; time.sleep({wait_s}); print({lines!r})\n"
    ssh(**scripts, **({} if readable else {"c": "raise SystemExit(255)"}))
    code = live.logs.callback.__wrapped__(Options(json=True), lines=9, follow=False)
    captured = capsys.readouterr()
    texts = [json.loads(line)["text"] for line in captured.out.splitlines()]
    assert (code, texts) == (0 if readable else 1, ["a1", "b2", "b3", "a4"])
    assert captured.err.startswith("" if readable else "c: journal unreadable")


@pytest.mark.skipif(not shutil.which("ssh"), reason="needs ssh")
def test_logs_do_not_wait_forever_for_a_host_that_accepts_connections_but_does_not_answer(
    monkeypatch, capsys
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        data = {"_sudo": False, "ssh_hostname": "127.0.0.1", "ssh_port": port}
        hosts = [SimpleNamespace(name="a", data=data)]
        monkeypatch.setattr(live, "select_hosts", lambda options, must_serve: hosts)
        monkeypatch.setattr(connect, "CONNECT_TIMEOUT_S", 1)
        assert live.logs.callback.__wrapped__(Options(), lines=9, follow=False) == 1
    cause = f"a: unreachable: [127.0.0.1]:{port}: timed out"
    assert capsys.readouterr().err.startswith(cause)


def sample(at, tokens, drafted=0, accepted=0):
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


def rows(*services, width=100):
    console = Console(width=width, file=io.StringIO())
    console.print(live.table(services, width))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        (sample(10, 1000, 100, 80) + sample(12, 1100, 200, 160), "m 2 1 50.0 80% 25% 6.7 61 48"),
        (sample(10, 1000) + sample(12, 10), "m 2 1 - - 25% 6.7 61 48"),
        ("at 1\nmemory 7000000\ngpu [N/A],[N/A]\nend\n", "- - - - - - 6.7 - -"),
        (sample(1, 5).removesuffix("end\n"), "- - - - - - - - -"),
    ],
)
def test_top_computes_rates_from_two_samples(text, cells):
    now = live.compute_load("spark-1", list(live.parse_samples(text.splitlines())))
    assert rows(now)[1].split() == ["spark-1", *cells.split()]


@pytest.mark.parametrize(("script", "code"), [("print(TEXT)", 0), ("raise SystemExit(255)", 1)])
def test_top_once_prints_one_sample_and_fails_if_no_host_answers(ssh, capsys, script, code):
    ssh(a=f"TEXT = {sample(1, 5) + sample(3, 25)!r}\n{script}\n")
    assert live.top.callback.__wrapped__(Options(json=True), once=True, service=None) == code
    [service] = json.loads(capsys.readouterr().out)
    assert service["tokens_per_s"] == (10.0 if code == 0 else None)


def test_top_shows_each_service_on_its_own_row(ssh, tmp_path, capsys):
    log = str(tmp_path / "commands")
    ssh(a=f"import sys; open({log!r}, 'a').write(sys.argv[-1]); print({sample(1, 5)!r})\n")
    services = ["main", "embed"]
    assert live.top.callback.__wrapped__(Options(json=True), once=True, service=services) == 0
    assert [row["host"] for row in json.loads(capsys.readouterr().out)] == ["a", "a/embed"]
    commands = (tmp_path / "commands").read_text()
    assert all(f"engines/{name}/engine.sock" in commands for name in services)


def test_top_starts_no_process_if_a_host_lacks_the_service(ssh, monkeypatch):
    def selected_services(host, service):
        if host.name == "b":
            raise SparkError.single("--service", "unknown", "choose another")
        return ["main"]

    ssh(a="", b="")
    monkeypatch.setattr(live, "selected_services", selected_services)
    monkeypatch.setattr(live, "_start_ssh", lambda login, script: pytest.fail("was started"))
    with pytest.raises(SparkError):
        live.top.callback.__wrapped__(Options(json=True), once=True, service="embed")


@pytest.mark.parametrize(("width", "shows_power"), [(60, False), (80, False), (160, True)])
def test_rows_of_top_fit_the_screen_and_keep_names_and_speed(width, shows_power):
    load = live.Load("spark-kitchen-1.lan", 2, 1, 50.0, 0.8, 0.2, 2**33, 61, 48, "qwen3.5-122b")
    others = (live.compute_load(name, []) for name in ("spark-2", "spark-of-the-cellar.home.lan"))
    title, line, *more = rows(load, *others, width=width)
    assert (len(more), more[0].split()[0]) == (2, "spark-2")
    assert line.split()[:2] == ["spark-kitchen-1.lan", "qwen3.5-122b"]
    assert max(map(len, (title, line, *more))) <= width
    assert ("tok/s" in title, "W" in title) == (True, shows_power)
