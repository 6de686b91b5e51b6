import contextlib
import http.client
import json
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest
from gateway_client import (
    CHAT,
    MIB,
    NAMES,
    OWN_KEY,
    QUESTION,
    free_port,
    recording_gateway,
    running_gateway,
)
from simulated_host import Killed
from spark_contract.tool import HostToolError
from spark_host.gateway import gateway, keys
from spark_host.system import host as system
from stub_host import REPOSITORY
from test_gateway_limits import answered, connect, request

NAMES_OF_KEYS = ("anna", "bob_", "carl")
ANNA, BOB, CARL = (f"sk-{name * 8}-{'x' * 10}"[:46].ljust(46, "y") for name in NAMES_OF_KEYS)
MODELS, COMPLETIONS = "/v1/models", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def key(token, **limits):
    unlimited = dict.fromkeys(("max_concurrent", "max_requests_per_min", "max_body_bytes"))
    return {"sha256": sha256(token.encode()).hexdigest(), **unlimited, **limits}


def two_keys(**limits_of_anna):
    return {"anna": key(ANNA, **limits_of_anna), "bob": key(BOB)}


def usage(host, service="main"):
    time.sleep(0.1)
    counts = keys.read_usage(service, host.paths).keys
    return {name: count.requests for name, count in counts.items()}


def test_accepts_named_keys_in_both_headers(js_host):
    with recording_gateway(js_host, keys=two_keys()) as client:
        for token in (ANNA, BOB):
            assert client.status(CHAT, QUESTION, key=token) == 200
            assert client.status(CHAT, QUESTION, key=None, x_api_key=token) == 200
        assert client.status(CHAT, QUESTION) == 200
        digest = sha256(ANNA.encode()).hexdigest()
        for wrong in (ANNA[:-1], f"{ANNA}x", ANNA.swapcase(), f"sk-{'z' * 43}", digest, "anna", ""):
            assert client.status(CHAT, QUESTION, key=wrong) == 401
            assert client.status(CHAT, QUESTION, key=None, x_api_key=wrong) == 401


def test_named_keys_work_on_a_host_with_several_services(js_host):
    with recording_gateway(js_host, tuple(NAMES), names=NAMES, keys=two_keys()) as client:
        for model, service in (("embedder", "embed"), ("main-model", "main")):
            assert client.status(CHAT, {"model": model}, key=ANNA) == 200
            assert client.received() == {service: [CHAT]}
        assert client.status(CHAT, {"model": "embedder"}, key="wrong") == 401
        assert usage(js_host) == {"anna": 2}


def test_named_keys_are_not_stored_in_files_and_usage_is_private(js_host):
    with running_gateway(js_host, keys=two_keys()) as client:
        assert client.status(CHAT, QUESTION, key=ANNA) == 200
        assert client.status(CHAT, QUESTION, key=f"sk-{'z' * 43}") == 401
        for path in js_host.paths.root.rglob("*"):
            if path.is_file():
                assert ANNA.encode() not in path.read_bytes(), path
        assert ANNA not in Path(f"/proc/{client.process.pid}/cmdline").read_text()
        assert js_host.paths.usage("main").parent.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_revoked_key_is_rejected_but_in_flight_responses_finish(js_host):
    with running_gateway(js_host, keys=two_keys()) as client:
        body = {**QUESTION, "stream": True, "messages": [
            {"role": "user", "content": "Repeat exactly: " + "abcd" * 40}]}  # fmt: skip
        answer = client.send(CHAT, body, key=ANNA)
        assert answer.readline().startswith(b"data: ")
        js_host.gateway(port=client.settings.port, keys={"bob": key(BOB)})
        gateway.reload("main", js_host.paths)
        assert client.status(CHAT, QUESTION, key=ANNA) == 401
        assert client.status(CHAT, QUESTION, key=BOB) == 200
        assert answer.read().rstrip().endswith(b"data: [DONE]")


@pytest.mark.slow
def test_limits_concurrent_requests_per_key_across_addresses(js_host):
    with (
        recording_gateway(js_host, keys=two_keys(max_concurrent=3)) as client,
        ExitStack() as stack,
    ):
        client.engines["main"].may_answer.clear()
        data = request(MODELS, ANNA, method="GET", length=0)
        connections = [
            stack.enter_context(connect(client, data, f"127.0.0.{number + 2}"))
            for number in range(5)
        ]
        assert answered(connections, 2) == [429] * 2
        client.engines["main"].may_answer.set()
        assert answered(connections, 3) == [200] * 3
        assert [client.status(MODELS, key=token) for token in (BOB, ANNA)] == [200, 200]


def test_limits_requests_per_minute_for_each_key(js_host):
    with recording_gateway(js_host, keys=two_keys(max_requests_per_min=4)) as client:
        statuses = [client.status(MODELS, key=ANNA) for _ in range(8)]
        assert statuses == [200] * 5 + [429] * 3
        assert client.status(MODELS, key=BOB) == 200
        assert client.status(MODELS) == 200
        named = two_keys(max_requests_per_min=2)
        js_host.gateway(port=client.settings.port, keys=named)
        gateway.reload("main", js_host.paths)
        assert [client.status(MODELS, key=ANNA) for _ in range(4)] == [200] * 3 + [429]


def test_limits_the_body_size_per_key(js_host):
    large = {"model": "main-model", "filler": "x" * 1000}
    with recording_gateway(js_host, keys=two_keys(max_body_bytes=500)) as client:
        assert client.status(CHAT, QUESTION, key=ANNA) == 200
        status, text = client.ask(CHAT, large, key=ANNA)
        assert (status, json.loads(text)["error"]["code"]) == (413, 413)
        assert client.status(CHAT, iter([b"{}"]), key=ANNA) == 413
        assert client.status(CHAT, large, key=BOB) == 200
        assert client.status(CHAT, iter([b"{}"]), key=BOB) == 200


OUTPUT_LIMIT = 2048
ALLOWED = [
    (CHAT, b'{"max_tokens": 2048}'), (CHAT, b'{"n":2,"max_completion_tokens":1024}'),
    (CHAT, b'{"max_tokens": 9999, "max_tokens": 1}'), (CHAT, b'{"max_tokens": null, "n":1, '
     b'"max_completion_tokens": 7}'), (CHAT, b'{"messages": [{"n": 9}], "max\\u005ftokens" : 5\n}'),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": 2048.0}'), (MESSAGES, b'{"max_tokens": 1}'),
    (RESPONSES, b'{"max_output_tokens": 2048, "input": []}'),
    (CHAT, b'{"x": "%s", "max_tokens": 5}' % (b"y" * 300_000)),
]  # fmt: skip
UTF16 = '{"∢" : 0}'.encode("utf-16-le").replace(b'""', b'","max_tokens":1,"')
REJECTED = [
    (CHAT, b"{}"), (CHAT, b""), (CHAT, b"not JSON"), (CHAT, b'[{"max_tokens": 1}]'), (CHAT, UTF16),
    (CHAT, b'{"max_tokens": 2049}'), (CHAT, b'{"max_tokens": 1025, "n": 2}'),
    (CHAT, b'{"max_tokens": 1, "max_completion_tokens": 2049}'), (CHAT, b'{"max_tokens": "1"}'),
    (CHAT, b'{"max_tokens": 1, "max_tokens": 9999}'), (CHAT, b'{"max_tokens": [1]}'),
    (CHAT, b'{"max_tokens": 1, "max\\u005ftokens": 2049}'), (CHAT, b'{"max_tokens": null}'),
    (CHAT, b'{"max_tokens": -1}'), (CHAT, b'{"max_tokens": 0}'), (CHAT, b'{"max_tokens": 1e4}'),
    (CHAT, b'{"max_tokens": 1.%s1e5}' % (b"0" * 600)), (CHAT, b'{"max_tokens": 5, "n": -1}'),
    (CHAT, b'{"x": {"max_tokens": 1}}'), (CHAT, b'{"__proto__": {"max_tokens": 1}}'),
    (COMPLETIONS, b'{"prompt": ["a", "b"], "max_tokens": 2048}'), (COMPLETIONS, b'{"prompt": "a"}'),
    (MESSAGES, b'{"max_tokens": 9999}'), (RESPONSES, b'{"max_tokens": 5}'),
    (CHAT, b'{"x": "%s", "max_tokens": 9999}' % (b"y" * 300_000)),
]  # fmt: skip


@pytest.mark.parametrize("names", [None, NAMES], ids=["service", "services"])
def test_limits_requested_output_tokens_per_key(js_host, names):
    limited = two_keys(max_output_tokens=OUTPUT_LIMIT)
    settings = {"keys": limited, "names": names, "max_body_bytes": MIB}
    with recording_gateway(js_host, tuple(names or ["main"]), **settings) as client:
        engine = client.engines["main"]
        for path, body in ALLOWED:
            assert client.status(f"{path}?a=b", body, key=ANNA) == 200, body[:80]
            assert engine.take_lines() == [f"POST {path}?a=b HTTP/1.1"]
            assert engine.last_body == body
        for path, body in REJECTED:
            status, text = client.ask(path, body, key=ANNA)
            assert (status, json.loads(text)["error"]["code"]) == (400, 400), body[:80]
            assert str(OUTPUT_LIMIT) in text.decode()
            assert client.received() == {}
        assert client.status(CHAT, iter([b'{"max_tok', b'ens": 5}']), key=ANNA) == 200
        assert client.status(CHAT, iter([b'{"max_tok', b'ens": 5000}']), key=ANNA) == 400
        assert client.status("/v1/embeddings", {"input": "x"}, key=ANNA) == 200
        client.received()
        for token in (BOB, client.key):
            for path, body in REJECTED:
                assert client.status(path, body, key=token) == 200
                assert client.received() == {"main": [path]}
                assert engine.last_body == body
        for path in ("/limited", "/limit-output", "/limit-output-large"):
            assert client.status(f"{path}{CHAT}", b"{}", key=ANNA) == 404


def test_counts_admitted_requests_and_bytes_per_key(js_host):
    named = two_keys(max_requests_per_min=2) | {"carl": key(CARL, max_body_bytes=5)}
    with recording_gateway(js_host, keys=named) as client:
        for token in (ANNA, ANNA, ANNA, ANNA, BOB, "wrong", client.key, CARL):
            client.status(CHAT, QUESTION, key=token)
        assert [client.status(path, key=BOB) for path in ("/", CHAT)] == [404, 405]
        assert usage(js_host) == {"anna": 3, "bob": 1, "api_key": 1}
        before = keys.read_usage("main", js_host.paths).keys
        assert before["bob"].received_bytes > len(json.dumps(QUESTION))
        assert before["bob"].sent_bytes > len(client.engines["main"].answer)
        keys.add_logged_usage(js_host.paths)
        assert keys.read_usage("main", js_host.paths).keys == before
        client.status(CHAT, QUESTION, key=BOB)
        assert usage(js_host) == {"anna": 3, "bob": 2, "api_key": 1}


@pytest.fixture
def usage_log(host):
    path = host.paths.usage("main").with_suffix(".log")
    path.parent.mkdir(parents=True)
    return path


def append(log, data):
    with log.open("ab") as lines:
        lines.write(data)


@pytest.mark.parametrize("step", ["write_document", "read_output"])
def test_usage_counts_each_request_once_after_a_killed_update(host, usage_log, monkeypatch, step):
    usage_log.write_bytes(b"anna 100 1000\nbob 7 8\n\0\0\0\n")

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(keys, step, die)
        with pytest.raises(Killed):
            keys.add_logged_usage(host.paths)
    append(usage_log, b"bob 1 1\n")
    keys.add_logged_usage(host.paths)
    assert usage_log.read_bytes().strip(b"\0") == b""
    assert usage(host) == {"anna": 1, "bob": 2}
    usage_log.write_bytes(b"bob 1 1\n" * 2)
    assert usage(host) == {"anna": 1, "bob": 4}


def test_usage_counts_requests_that_are_logged_during_an_update(host, usage_log, monkeypatch):
    logged = []
    usage_log.touch()
    keys.add_logged_usage(host.paths)  # nothing is logged yet

    def write_and_log(path, document):
        system.write_document(path, document)
        append(usage_log, b"bob 1 1\n")
        logged.append("bob")

    append(usage_log, b"anna 1 1\n" * 10_000)
    size = usage_log.stat().st_blocks
    monkeypatch.setattr(keys, "write_document", write_and_log)
    for _ in range(2):
        keys.add_logged_usage(host.paths)
        assert usage(host) == {"anna": 10_000, "bob": len(logged)}
    assert usage_log.stat().st_blocks < size / 2


@pytest.mark.slow
def test_balancer_counts_and_limits_a_request_once(js_host):
    replicas = {"port": free_port(), "others": []}
    named = two_keys(max_concurrent=2, max_requests_per_min=4, max_body_bytes=5000)
    with recording_gateway(js_host, keys=named, replicas=replicas, max_body_bytes=9000) as client:
        port = replicas["port"]
        assert client.status(CHAT, {"x": "y" * 6000}, key=ANNA, port=port) == 413
        statuses = [client.status(CHAT, QUESTION, key=ANNA, port=port) for _ in range(6)]
        assert statuses == [200] * 4 + [429] * 2
        assert usage(js_host) == {"anna": 4}
        client.engines["main"].may_answer.clear()
        data = request(MODELS, BOB, method="GET", length=0)
        with connect(client, data, port=port) as first, connect(client, data, port=port) as second:
            assert answered([first, second], 0) == []
            client.engines["main"].may_answer.set()


def test_key_limits_apply_to_clients_on_the_address_of_another_replica(js_host):
    replicas = {"port": free_port(), "others": [f"127.0.0.1:{free_port()}"]}
    named = two_keys(max_requests_per_min=2)
    with recording_gateway(js_host, keys=named, replicas=replicas) as client:
        statuses = [client.status(CHAT, QUESTION, key=ANNA) for _ in range(5)]
        assert statuses == [200] * 3 + [429] * 2


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


def test_gateway_command_replaces_itself_with_nginx(nginx_host):
    homes = f"PYTHONPATH={REPOSITORY}/files/host:{REPOSITORY}/files/contract"
    verb = [sys.executable, "-m", "spark_host", "gateway", "main"]
    command = ["env", homes, f"SPARK_ROOT={nginx_host.paths.root}", *verb]
    with running_gateway(nginx_host, command=command) as client:
        assert client.status(CHAT, QUESTION) == 200
        assert "nginx" in Path(f"/proc/{client.process.pid}/comm").read_text()


def test_key_is_not_in_engine_arguments_or_readable_files(client):
    client.status(CHAT, QUESTION)
    assert client.key not in client.host.log.read_text()
    assert client.key not in Path(f"/proc/{client.process.pid}/cmdline").read_text()
    for path in client.host.paths.root.rglob("*"):
        if path.is_file() and client.key.encode() in path.read_bytes():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.slow
def test_closed_gateway_returns_503_but_finishes_in_flight_responses(client):
    answer = client.start_long_answer()
    gateway.close_traffic("main", client.host.paths)
    with client.send(CHAT, QUESTION) as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (503, "10")
        assert json.load(refused)["error"]["type"] == "service_unavailable"
    assert client.status("/health", key=None) == 503
    assert answer.read().rstrip().endswith(b"data: [DONE]")


def test_gateway_returns_503_if_the_engine_is_missing(client):
    client.host.engines[0].kill()
    client.host.engines[0].wait()
    with client.send(CHAT, QUESTION) as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (503, "10")
        assert json.load(refused)["error"]["code"] == 503


def test_streams_answers(client):
    with client.start_long_answer() as answer:
        client.host.engines[0].kill()
        rest = b""
        with contextlib.suppress(http.client.IncompleteRead):
            rest = answer.read()
    # A proxy that buffers would send the first piece after the last.
    assert b"[DONE]" not in rest


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "kind"),
    [
        ("/v1/messages", {}, None, 401, "authentication_error"),
        ("/metrics", None, OWN_KEY, 404, "not_found_error"),
        (CHAT, None, OWN_KEY, 405, "invalid_request_error"),
        (CHAT, {"filler": "x" * 5000}, OWN_KEY, 413, "invalid_request_error"),
    ],
)
def test_gateway_errors_are_readable_by_openai_and_anthropic_clients(
    client, path, body, key, status, kind
):
    got_status, text = client.ask(path, body, key=key)
    error = json.loads(text)
    assert (got_status, error["error"]["code"]) == (status, status)
    assert error["type"] == "error"
    assert error["error"]["type"] == kind
    assert error["error"]["message"]


@pytest.mark.slow
def test_new_key_replaces_the_old_key_and_in_flight_responses_finish(client):
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
