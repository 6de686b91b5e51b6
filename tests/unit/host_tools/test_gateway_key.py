import json
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gateway_client import CHAT, OWN_KEY, QUESTION, running_gateway
from spark_contract.tool import HostToolError
from spark_host.gateway import gateway
from stub_host import REPOSITORY


def test_accepts_only_the_exact_key(client):
    key, status = client.key, client.status
    assert key.swapcase() != key
    assert status(CHAT, QUESTION, key=key) == 200
    assert status(CHAT, QUESTION, key=None, x_api_key=key) == 200
    for wrong in ("wrong", key[:-1], f"{key}x", key.swapcase()):
        assert status(CHAT, QUESTION, key=wrong) == 401
        assert status(CHAT, QUESTION, key=None, x_api_key=wrong) == 401
    assert status(CHAT, QUESTION, key=None) == 401
    assert status(CHAT, QUESTION, key=None, Authorization=key) == 401


def test_gateway_verb_becomes_nginx(nginx_host):
    homes = f"PYTHONPATH={REPOSITORY}/files/host:{REPOSITORY}/files/contract"
    verb = [sys.executable, "-m", "spark_host", "gateway", "main"]
    command = ["env", homes, f"SPARK_ROOT={nginx_host.paths.root}", *verb]
    with running_gateway(nginx_host, command=command) as client:
        assert client.status(CHAT, QUESTION) == 200
        assert "nginx" in Path(f"/proc/{client.process.pid}/comm").read_text()


def test_key_is_neither_in_engine_argv_nor_in_readable_files(client):
    client.status(CHAT, QUESTION)
    assert client.key not in client.host.log.read_text()
    assert client.key not in Path(f"/proc/{client.process.pid}/cmdline").read_text()
    for path in client.host.paths.root.rglob("*"):
        if path.is_file() and client.key.encode() in path.read_bytes():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.slow
def test_closed_traffic_returns_503_and_keeps_in_flight_responses(client):
    answer = client.start_long_answer()
    gateway.close_traffic("main", client.host.paths)
    with client.send(CHAT, QUESTION) as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (503, "10")
        assert json.load(refused)["error"]["type"] == "service_unavailable"
    assert client.status("/health", key=None) == 503
    assert answer.read().rstrip().endswith(b"data: [DONE]")


def test_missing_engine_returns_503(client):
    client.host.engines[0].kill()
    client.host.engines[0].wait()
    with client.send(CHAT, QUESTION) as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (503, "10")
        assert json.load(refused)["error"]["code"] == 503


@pytest.mark.slow
def test_streams_answers(client):
    start = time.monotonic()
    answer = client.start_long_answer()
    arrivals = [time.monotonic() - start]
    while line := answer.readline():
        if line.startswith(b"data: "):
            arrivals.append(time.monotonic() - start)
    assert len(arrivals) >= 11
    # Pieces 50 ms apart: a buffering proxy would send them together.
    assert arrivals[-1] - arrivals[0] > 0.4
    assert arrivals[0] < 0.3


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "kind"),
    [
        ("/v1/messages", {}, None, 401, "authentication_error"),
        ("/metrics", None, OWN_KEY, 404, "not_found_error"),
        (CHAT, None, OWN_KEY, 405, "invalid_request_error"),
        (CHAT, {"filler": "x" * 5000}, OWN_KEY, 413, "invalid_request_error"),
    ],
)
def test_errors_fit_openai_and_anthropic_clients(client, path, body, key, status, kind):
    got_status, text = client.ask(path, body, key=key)
    error = json.loads(text)
    assert (got_status, error["error"]["code"]) == (status, status)
    assert error["type"] == "error"
    assert error["error"]["type"] == kind
    assert error["error"]["message"]


@pytest.mark.slow
def test_new_key_replaces_the_old_and_keeps_in_flight_responses(client):
    old, answer = client.key, client.start_long_answer()
    gateway.new_key("main", client.host.paths)
    assert client.key != old
    assert client.status(CHAT, QUESTION) == 200
    assert client.status(CHAT, QUESTION, key=old) == 401
    assert answer.read().rstrip().endswith(b"data: [DONE]")


def test_key_is_created_once_and_readable_only_by_root(host):
    settings, path = host.gateway(), host.paths.root / "etc/spark/api-key"
    gateway.create_missing_key(settings, host.paths)
    first = gateway.read_key(settings, host.paths)
    gateway.create_missing_key(settings, host.paths)
    assert gateway.read_key(settings, host.paths) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(HostToolError, match="readable by others"):
        gateway.read_key(settings, host.paths)


@pytest.mark.parametrize("key", ["short", 'quote"1234567890123456', "brace{}1234567890123456"])
def test_rejects_key_that_could_break_the_configuration(host, key):
    settings = host.gateway()
    gateway.create_missing_key(settings, host.paths)
    (host.paths.root / "etc/spark/api-key").write_text(key)
    with pytest.raises(HostToolError, match="must contain 16 to 512"):
        gateway.read_key(settings, host.paths)


@pytest.mark.slow
def test_serializes_concurrent_configuration_writes(nginx_host):
    settings, paths = nginx_host.gateway(), nginx_host.paths
    gateway.create_missing_key(settings, paths)
    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(gateway._install_config, settings, paths) for _ in range(24)]
    assert {result.result() for result in results} == {paths.gateway_run("main")}
    assert gateway.is_current(settings, paths)
