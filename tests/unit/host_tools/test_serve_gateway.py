"""The gateway: a real nginx before a stub engine, on a port of 127.0.0.1."""

from __future__ import annotations

import itertools
import json
import re
import stat
import time
from pathlib import Path

import pytest
from spark_contract.errors import HostToolError
from spark_host.gateway import gateway, nginx, traffic
from stub_gateway import QUESTION, Door, as_a_unit_does, long_answer, running
from stub_host import REPOSITORY, Host


def test_only_the_right_key_is_accepted(gate: Door) -> None:
    assert gate.chat(Authorization=f"Bearer {gate.key}") == 200
    assert gate.chat(x_api_key=gate.key) == 200
    assert gate.chat() == 401
    assert gate.chat(Authorization="Bearer wrong") == 401
    assert gate.chat(Authorization=gate.key) == 401
    assert gate.chat(x_api_key=gate.key[:-1]) == 401
    assert gate.chat(Authorization=f"Bearer {gate.key}x") == 401


def test_key_is_case_sensitive(gate: Door) -> None:
    assert gate.key.swapcase() != gate.key
    assert gate.chat(Authorization=f"Bearer {gate.key.swapcase()}") == 401
    assert gate.chat(x_api_key=gate.key.swapcase()) == 401


LEFT_OPEN = (
    *("/invocations", "/metrics", "/tokenize", "/detokenize", "/version", "/load", "/docs"),
    *("/openapi.json", "/ping", "/", "/v1/load_lora_adapter", "/v1/chat/completions/render"),
    *("//invocations", "/v1/../invocations", "/%69nvocations", "/v1/models/../../metrics"),
    *("/v1/chat/completions/", "/v1/responses/render", "/v1/responses/resp_1/render"),
)


def test_unlisted_engine_paths_return_404(gate: Door) -> None:
    for path, body in itertools.product(LEFT_OPEN, (None, QUESTION)):
        status, _, text = gate.ask(path, body, Authorization=f"Bearer {gate.key}")
        assert (path, status) == (path, 404)
        assert json.loads(text)["error"]["code"] == 404


def test_allowed_paths_reach_the_engine(gate: Door) -> None:
    body = {**QUESTION, "prompt": "What is 12 + 30?", "input": "What is 12 + 30?"}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"):
        status, _, text = gate.ask(path, body, Authorization=f"Bearer {gate.key}")
        assert (path, status, b"42" in text) == (path, 200, True)


def test_allow_list_matches_the_engines_routes() -> None:
    # Routes of vLLM 0.32.0, from its log, as "path method".
    lines = (REPOSITORY / "tests/fixtures/engine-routes-0.32.0.txt").read_text().splitlines()
    paths = {line.split()[0].replace("{response_id}", "resp_0a-1_b") for line in lines}
    allowed = [
        re.escape(route.path) + route.pattern.replace("?<", "?P<") + route.end
        for route in nginx.ROUTES
    ]
    assert {path for path in paths if any(re.fullmatch(one, path) for one in allowed)} == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/responses",
        "/v1/responses/resp_0a-1_b",
        "/v1/responses/resp_0a-1_b/cancel",
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", QUESTION),
        ("/v1/messages/count_tokens", QUESTION),
        ("/v1/models/main-model", None),
    ],
)
def test_optional_paths_are_forwarded(gate: Door, path: str, body: object) -> None:
    assert gate.ask(path, body)[0] == 401
    _, _, text = gate.ask(path, body, Authorization=f"Bearer {gate.key}")
    assert b"no such path" not in text  # the gateway's words


def test_gateway_command_execs_nginx(gate: Door) -> None:
    gate.process.terminate()
    gate.process.wait(10)
    with running(gate.host, engine=False, command=as_a_unit_does(gate.host)) as door:
        assert door.chat(Authorization=f"Bearer {door.key}") == 200
        assert "nginx" in Path(f"/proc/{door.process.pid}/comm").read_text()


def test_models_needs_a_key_and_health_does_not(gate: Door) -> None:
    assert gate.ask("/health")[0] == 200
    assert gate.ask("/v1/models")[0] == 401
    assert gate.ask("/v1/models", Authorization=f"Bearer {gate.key}")[0] == 200


def test_the_key_never_reaches_the_engine_argv_or_a_readable_file(gate: Door) -> None:
    gate.chat(Authorization=f"Bearer {gate.key}")
    assert gate.key not in gate.host.log.read_text()
    command = Path(f"/proc/{gate.process.pid}/cmdline").read_text()
    assert gate.key not in command
    for path in gate.host.paths.root.rglob("*"):
        if path.is_file() and gate.key.encode() in path.read_bytes():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_closed_traffic_returns_503_and_keeps_running_answers(gate: Door) -> None:
    answer = long_answer(gate)
    traffic.close("main", gate.host.paths)
    status, headers, text = gate.ask(
        "/v1/chat/completions", QUESTION, Authorization=f"Bearer {gate.key}"
    )
    assert (status, headers["Retry-After"]) == (503, "10")
    assert json.loads(text)["error"]["type"] == "service_unavailable"
    assert gate.ask("/health")[0] == 503
    assert answer.read().rstrip().endswith(b"data: [DONE]")


def test_absent_engine_returns_503(gate: Door) -> None:
    gate.host.engines[0].kill()
    gate.host.engines[0].wait()
    status, headers, text = gate.ask(
        "/v1/chat/completions", QUESTION, Authorization=f"Bearer {gate.key}"
    )
    assert (status, headers["Retry-After"]) == (503, "10")
    assert json.loads(text)["error"]["code"] == 503


def test_answers_are_streamed(gate: Door) -> None:
    connection = gate.connect()
    body = {
        **QUESTION,
        "stream": True,
        "messages": [{"role": "user", "content": "Repeat exactly: " + "abcd" * 10}],
    }
    start = time.monotonic()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {gate.key}"}
    )
    answer = connection.getresponse()
    arrivals = []
    while line := answer.readline():
        if line.startswith(b"data: "):
            arrivals.append(time.monotonic() - start)
    assert len(arrivals) >= 11
    # Ten pieces 50 ms apart: a buffering proxy would hand them over together.
    assert arrivals[-1] - arrivals[0] > 0.4
    assert arrivals[0] < 0.3


def test_a_body_over_the_limit_is_refused(gate: Door) -> None:
    body = {**QUESTION, "filler": "x" * 5000}
    status, _, text = gate.ask("/v1/chat/completions", body, Authorization=f"Bearer {gate.key}")
    assert (status, json.loads(text)["error"]["code"]) == (413, 413)


def test_new_key_replaces_the_old_at_once(gate: Door) -> None:
    old = gate.key
    gateway.new_key("main", gate.host.paths)
    assert gate.key != old
    assert gate.chat(Authorization=f"Bearer {gate.key}") == 200
    assert gate.chat(Authorization=f"Bearer {old}") == 401


def test_running_answer_survives_a_key_change(gate: Door) -> None:
    answer = long_answer(gate)
    gateway.new_key("main", gate.host.paths)
    assert answer.read().rstrip().endswith(b"data: [DONE]")


def test_key_is_created_once_and_readable_only_by_root(host: Host) -> None:
    settings = host.gateway()
    gateway.make_key(settings, host.paths)
    first = gateway.read_key(settings, host.paths)
    gateway.make_key(settings, host.paths)
    assert gateway.read_key(settings, host.paths) == first
    path = host.paths.root / "etc/spark/api-key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(HostToolError, match="readable by others"):
        gateway.read_key(settings, host.paths)


@pytest.mark.parametrize("key", ["short", 'quote"1234567890123456', "brace{}1234567890123456"])
def test_refuses_a_key_that_could_break_the_configuration(host: Host, key: str) -> None:
    settings = host.gateway()
    gateway.make_key(settings, host.paths)
    (host.paths.root / "etc/spark/api-key").write_text(key)
    with pytest.raises(HostToolError, match="not a usable key"):
        gateway.read_key(settings, host.paths)
