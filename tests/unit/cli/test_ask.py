import json
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from spark_deploy.bench.protocols import Endpoint
from spark_deploy.bench.result import Answer
from spark_deploy.cli import connect, main

PIECES = [("let me think", True), ("Par", False), ("is\x1b]0;owned\x07\n", False)]


@pytest.fixture
def requests(monkeypatch):
    sent: list[tuple[Any, ...]] = []

    @contextmanager
    def open_endpoint(target, service):
        yield Endpoint(f"http://{target.name}/v1", "m", "sk-key")

    def measure(endpoint, text, tokens, *, temperature, show):
        sent.append((endpoint.base_url, text, tokens, temperature))
        for piece in PIECES:
            show(*piece)
        return Answer("", 1, tokens, 7, 20, 0.25, 2.0)

    hosts = [SimpleNamespace(name="spark-1"), SimpleNamespace(name="spark-2")]
    monkeypatch.setattr(connect, "select_hosts", lambda options, **_: hosts[: len(options.limit)])
    monkeypatch.setattr(connect, "hosts_for_clients", lambda hosts, *_: hosts)
    monkeypatch.setattr(connect, "open_endpoint", open_endpoint)
    embeds, chats = SimpleNamespace(task="embedding"), SimpleNamespace(task="chat")
    monkeypatch.setattr(
        connect, "make_connection", lambda target, **_: embeds if target.name == "embeds" else chats
    )
    monkeypatch.setattr(connect, "measure_answer", measure)
    return sent


def test_ask_prints_speed_and_answer_without_control_characters(requests, capsys):
    assert main(["ask", "capital of France?", "spark-1", "--tokens", "99"]) == 0
    assert requests == [("http://spark-1/v1", "capital of France?", 99, None)]
    output = capsys.readouterr()
    assert output.out.startswith("Paris")
    assert "\x1b" not in output.out
    assert "let me think" not in output.out
    assert "20 tokens, 10.0 tok/s, first token after 0.25 s" in output.err


def test_ask_json_has_an_object_for_each_host(requests, capsys):
    assert main(["ask", "?", "spark-1", "spark-2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [(r["host"], r["completion_tokens"], r["tokens_per_s"]) for r in results] == [
        ("spark-1", 20, 10.0), ("spark-2", 20, 10.0),
    ]  # fmt: skip
    assert len(requests) == 2


def test_ask_rejects_models_that_cannot_chat(requests, monkeypatch):
    hosts = [SimpleNamespace(name="embeds")]
    monkeypatch.setattr(connect, "select_hosts", lambda *_, **__: hosts)
    assert main(["ask", "?"]) == 1
    assert not requests
