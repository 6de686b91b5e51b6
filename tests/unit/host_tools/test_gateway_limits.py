import contextlib
import itertools
import os
import select
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from gateway_client import MIB, QUESTION, free_port, recording_gateway

STRANGER = "127.0.0.2"
COMPLETIONS = "/v1/completions"


def connect(client, data, source="127.0.0.1", port=None):
    address = ("127.0.0.1", port or client.settings.port)
    connection = socket.create_connection(address, 10, source_address=(source, 0))
    connection.sendall(data)
    return connection


def status(connection):
    try:
        head = connection.recv(4096)
    except ConnectionResetError:
        return 0
    return int(head.split(b" ")[1]) if head else 0


def request(path, key="", *, method="POST", length=2):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {length}"]
    lines += [f"X-Api-Key: {key}"] if key else []
    return "\r\n".join([*lines, "", ""]).encode()


def status_of_get(client, path, key):
    data = request(path, key, method="GET", length=0)
    with connect(client, data, STRANGER) as connection:
        return status(connection)


def stored_bytes(client):
    sizes = {"run": 0, "var": 0}
    master = client.process.pid
    workers = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    for entry in (entry for pid in workers for entry in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            target = Path(os.readlink(entry))
            if "body" in target.parts:
                top = target.relative_to(client.host.paths.root).parts[0]
                sizes[top] += entry.stat().st_size
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("balancer", [False, True], ids=["gateway", "balancer"])
def test_gateway_does_not_store_bodies_of_requests_without_a_key(nginx_host, balancer):
    replicas = {"port": free_port(), "others": []} if balancer else None
    settings = {"max_body_bytes": 8 * MIB, "replicas": replicas}
    with recording_gateway(nginx_host, **settings) as client, ExitStack() as stack:
        port = replicas["port"] if replicas else None
        paths = ["/health", "/v1/chat/completions", "/metrics", "/"] * 3
        for path, method in itertools.product(paths, ("GET", "POST")):
            head = request(path, method=method, length=8 * MIB)
            connection = stack.enter_context(connect(client, head, port=port))
            connection.settimeout(2)
            with contextlib.suppress(OSError):
                connection.sendall(b"x" * 4 * MIB)
        time.sleep(0.5)
        assert stored_bytes(client) == {"run": 0, "var": 0}


def test_health_accepts_only_get_without_body(nginx_host):
    with recording_gateway(nginx_host) as client:
        for data, expected in (
            *((request("/health", method=m, length=0), 405) for m in ("POST", "PUT", "HEAD")),
            *((request("/health", method=m) + b"{}", 413) for m in ("POST", "PUT", "HEAD")),
            (request("/health", method="GET", length=4000), 413),
        ):
            with connect(client, data) as connection:
                assert status(connection) == expected
        assert client.status("/health", key=None) == 200
        assert client.received() == {"main": ["/health"]}


def test_gateway_stores_large_bodies_on_disk(nginx_host):
    with recording_gateway(nginx_host, max_body_bytes=8 * MIB) as client:
        with connect(client, request(COMPLETIONS, client.key, length=8 * MIB)) as connection:
            connection.sendall(b"x" * (8 * MIB - 1))
            time.sleep(0.5)
            stored = stored_bytes(client)
            assert stored["run"] == 0
            assert stored["var"] >= 6 * MIB
            connection.sendall(b"x")
            assert status(connection) == 200
        assert client.engines["main"].body_sizes == [8 * MIB]
        time.sleep(0.2)
        assert stored_bytes(client)["var"] == 0


def test_limits_the_number_of_large_bodies(nginx_host):
    length = 200_000
    with recording_gateway(nginx_host, max_body_bytes=MIB) as client, ExitStack() as stack:
        data = request(COMPLETIONS, client.key, length=length)
        connections = [stack.enter_context(connect(client, data)) for _ in range(40)]
        for connection in connections:
            connection.settimeout(1)
            with contextlib.suppress(OSError):
                connection.sendall(b"x" * (length - 1))
        time.sleep(1)
        answered, _, _ = select.select(connections, [], [], 0)
        assert [status(connection) for connection in answered] == [429] * 8
        assert stored_bytes(client)["var"] <= 32 * length
        assert client.status("/v1/chat/completions", QUESTION) == 200


def test_large_bodies_sent_without_a_key_do_not_block_clients(nginx_host):
    # nginx discards the body of a refused request; that must not count against the limit.
    with recording_gateway(nginx_host, max_body_bytes=8 * MIB) as client, ExitStack() as stack:
        for number in range(60):
            path = (COMPLETIONS, "/health", "/none")[number % 3]
            data = request(path, length=8 * MIB)
            stack.enter_context(connect(client, data, STRANGER)).sendall(b"x" * 200_000)
        assert client.status(COMPLETIONS, b"x" * 2 * MIB) == 200
        assert client.engines["main"].body_sizes == [2 * MIB]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "key"),
    [("/v1/models", "wrong"), ("/v1/models", ""), ("/no-such-path", ""), ("/health", "")],
)
def test_limits_the_request_rate_per_address(nginx_host, path, key):
    data = request(path, key, method="GET", length=0)
    with recording_gateway(nginx_host, max_requests_per_s=5) as client, ExitStack() as stack:
        # All requests are sent before an answer is read: waiting could keep them below the limit.
        start = time.monotonic()
        connections = [stack.enter_context(connect(client, data, STRANGER)) for _ in range(100)]
        statuses = [status(connection) for connection in connections]
        assert 0 not in statuses
        burst = 2 * 5 + 1
        assert burst <= 100 - statuses.count(429) <= burst + 5 * (time.monotonic() - start)
        assert 429 in statuses
        assert status_of_get(client, "/v1/models", client.key) == 200


def answered(connections, count):
    """Wait for ``count`` statuses and 0.3 s for more; remove the connections that responded."""
    statuses, deadline = [], time.monotonic() + 10
    while True:
        limit_s = 0.3 if len(statuses) >= count else max(0, deadline - time.monotonic())
        ready, _, _ = select.select(connections, [], [], limit_s)
        if not ready:
            return statuses
        statuses += [status(connection) for connection in ready]
        connections[:] = [each for each in connections if each not in ready]


@pytest.mark.slow
@pytest.mark.parametrize("with_key", [True, False])
def test_limits_connections_per_address(nginx_host, with_key):
    with recording_gateway(nginx_host, max_connections=5) as client, ExitStack() as stack:
        client.engines["main"].may_answer.clear()
        path, key = ("/v1/models", client.key) if with_key else ("/health", "")
        data = request(path, key, method="GET", length=0)
        connections = [stack.enter_context(connect(client, data, STRANGER)) for _ in range(8)]
        assert answered(connections, 3) == [429] * 3
        # Requests without a key and those with one do not use up each other's limit.
        assert status_of_get(client, "/no-such-path", "" if with_key else client.key) == 404
        client.engines["main"].may_answer.set()
        assert client.status("/v1/models") == 200


@pytest.mark.parametrize("data", [b"", b"GET /v1/models HTTP/1.1\r\nX-"], ids=["idle", "half"])
def test_idle_connections_do_not_block_clients(nginx_host, data):
    with recording_gateway(nginx_host) as client, ExitStack() as stack:
        for number in range(2300):
            with contextlib.suppress(OSError):
                stack.enter_context(connect(client, data, f"127.0.0.{2 + number % 3}"))
        start = time.monotonic()
        assert client.status("/v1/models") == 200
        assert time.monotonic() - start < 8


@pytest.mark.slow
def test_gateway_rejects_an_endless_header(nginx_host):
    with recording_gateway(nginx_host) as client:
        connection = connect(client, b"GET /v1/models HTTP/1.1\r\n")
        start, number = time.monotonic(), 0
        with contextlib.suppress(OSError):
            while time.monotonic() - start < 60:
                connection.sendall(b"X-%d: y\r\n" % number)
                number += 1
                connection.settimeout(1)
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1):
                        break
        assert time.monotonic() - start < 50


def test_headers_of_all_connections_fit_in_memory(nginx_host):
    # Over TLS a head of 33 KiB cost 60 KiB, and 16384 of them a gigabyte, the gateway's limit.
    with recording_gateway(nginx_host) as client:
        fields = "".join(f"X-{number}: {'y' * 7900}\r\n" for number in range(3))
        large = f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode()
        assert status(connect(client, large)) == 400
        assert client.status(f"/v1/models?{'x' * 7900}") == 200


def test_log_entry_for_a_rejected_key_omits_the_key(nginx_host):
    journal = nginx_host.paths.root / "run/systemd/journal/dev-log"
    journal.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(journal))
        log.settimeout(10)
        with recording_gateway(nginx_host) as client:
            journal.chmod(0o666)
            assert status_of_get(client, "/v1/models?api_key=sk-in-query", "sk-not-it") == 401
            line = log.recv(4096).decode()
            assert client.status("/v1/models") == 200
            assert client.status("/none", key=None) == 404
            log.settimeout(0.5)
            with pytest.raises(TimeoutError):
                log.recv(4096)
    assert line.endswith(f"{STRANGER} sent an invalid key: GET /v1/models")
    assert "sk-" not in line
