import itertools
import re
import socket

import gateway_client
import pytest
from gateway_client import free_port, recording_gateway, running_gateway
from socket_servers import accepting
from stub_host import REPOSITORY

# First lines of requests that may reach the engine.
KEYLESS = re.compile(r"GET /health HTTP/1\.1")
WITH_KEY = re.compile(
    r"(GET /health"
    r"|POST /v1/(chat/completions|completions|responses|messages|messages/count_tokens)"
    r"|POST /v1/(embeddings|rerank|score)"
    r"|POST /(classify|pooling)"
    r"|POST /v1/responses/resp_[A-Za-z0-9_-]+/cancel"
    r"|GET /v1/models(/[A-Za-z0-9][A-Za-z0-9._:-]*)?"
    r"|GET /v1/responses/resp_[A-Za-z0-9_-]+)(\?[!-~]*)? HTTP/1\.1"
)
ALLOWED = (
    "GET /health",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/responses/resp_0a-1_b/cancel",
    "POST /v1/messages",
    "POST /v1/messages?beta=true",
    "POST /v1/messages/count_tokens",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /v1/score",
    "POST /v1/classify",
    "POST /v1/pooling",
    "GET /v1/models",
    "GET /v1/models/main-model",
    "GET /v1/responses/resp_0a-1_b",
)
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get", "PROPFIND")
HIDDEN = ("/metrics", "/invocations", "/tokenize", "/version", "/v1/load_lora_adapter", "/docs")
SIMILAR = ("/v1/chat/completions/", "/v1/responses/render", "/v1/responses/resp_1/render")


@pytest.fixture
def recorded(nginx_host):
    with recording_gateway(nginx_host) as client:
        yield client


def send(client, data):
    with socket.create_connection(("127.0.0.1", client.settings.port), 2) as connection:
        connection.sendall(data)
        try:
            while connection.recv(65536):
                pass
        except (ConnectionResetError, TimeoutError):
            pass


def spellings(path):
    yield path
    yield from (f"{path}{end}" for end in ("/", "//", "/.", "/..", "?", "?x=1", "#x", ";x", "%20"))
    yield from (f"{path}{end}" for end in ("%00", "%0d%0a", "%3f", "%23", "%2f", "\\", "\t", ".js"))
    yield from (f"{begin}{path}" for begin in ("/", "/.", "//", "/x/..", "/%2e", "/%2e%2e", "\\"))
    yield from (path.upper(), path.replace("/", "%2f"), path.replace("/", "\\"), path[1:])
    yield f"/%{ord(path[1]):02x}{path[2:]}"
    yield f"/%25{ord(path[1]):02x}{path[2:]}"
    yield f"/%{ord(path[1]):02X}{path[2:]}"
    yield f"http://localhost{path}"
    yield f"http://engine{path}?y"
    allowed = ("/health", "/v1/models", "/v1/chat/completions", "/v1/responses/resp_1")
    for other in allowed:
        parents = ("..", "%2e%2e", ".%2e", "..%2f..", "%2e%2e%2f", "..;", "..%5c..", "../..")
        for parent in (*parents, "...."):
            yield f"{other}/{parent}{path}"
            yield f"{path}/{parent}{other}"


def corpus():
    allowed = [line.split(" ", 1)[1] for line in ALLOWED]
    lines = (REPOSITORY / "tests/fixtures/engine-routes-0.32.0.txt").read_text().splitlines()
    routes = [line.split()[0].replace("{response_id}", "resp_1") for line in lines]
    plain = itertools.product(METHODS, dict.fromkeys([*allowed, *routes, *HIDDEN, *SIMILAR, "/"]))
    variants = [
        (method, target)
        for path in (*HIDDEN, "/health", "/v1/models", "/v1/responses/resp_1/cancel")
        for target in spellings(path)
        for method in ("GET", "POST")
    ]
    variants += [("GET", target) for target in ("/metrics//..//health", "/health?/../metrics")]
    return list(dict.fromkeys([*plain, *variants]))


def request(method, target, key, body=b""):
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    lines += [f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def test_only_allowed_path_spellings_are_forwarded_to_the_engine(recorded):
    engine, requests = recorded.engines["main"], corpus()
    assert len(requests) >= 1000
    for method, target in requests:
        send(recorded, request(method, target, None))
    without_key = engine.take_lines()
    assert {line for line in without_key if not KEYLESS.fullmatch(line)} == set()
    assert "GET /health HTTP/1.1" in without_key

    key = recorded.key
    for method, target in requests:
        send(recorded, request(method, target, key))
    reached = engine.take_lines()
    assert {line for line in reached if not WITH_KEY.fullmatch(line)} == set()
    expected = {re.sub("/v1/(classify|pooling)", r"/\1", line) for line in ALLOWED}
    assert {line.removesuffix(" HTTP/1.1") for line in reached} >= expected


@pytest.mark.slow
def test_requests_cannot_be_smuggled_in_bodies_or_headers(recorded):
    key = recorded.key
    hidden = request("GET", "/metrics", key)
    for method, target in [line.split(" ", 1) for line in ALLOWED]:
        for body in (b"", b"{}", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
            send(recorded, request(method, target, key, body) + hidden)
    first = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\n".encode()
    for rest in (
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1",
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden,
        b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n" + hidden,
        b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n" + hidden,
        b"X-Original-URL: /metrics\r\nX-Rewrite-URL: /metrics\r\n\r\n",
    ):
        send(recorded, first + rest + b"\r\n\r\n")
    reached = recorded.engines["main"].take_lines()
    assert {line for line in reached if not WITH_KEY.fullmatch(line)} == set()
    assert len(reached) >= len(ALLOWED)


@pytest.mark.parametrize("balancer", [False, True], ids=["gateway", "balancer"])
def test_requests_without_a_key_cannot_open_a_tunnel(nginx_host, balancer, monkeypatch):
    switch = b"HTTP/1.1 101 x\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n%d"
    monkeypatch.setattr(gateway_client, "HEAD", switch)
    replicas = {"port": free_port(), "others": []} if balancer else None
    with recording_gateway(nginx_host, replicas=replicas) as client:
        port = replicas["port"] if replicas else client.settings.port
        upgrade = b"\r\nConnection: Upgrade\r\nUpgrade: x\r\n"
        for line in (*ALLOWED, "GET /", "GET /none", "GET /refused/key"):
            data = request(*line.split(" ", 1), None).replace(b"\r\nConnection: close\r\n", upgrade)
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                connection.sendall(data)
                assert connection.recv(4096).split()[1] in (b"400", b"401", b"404", b"405")
        assert client.received() == {}


def test_clients_that_offer_http2_get_an_answer(recorded):
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAEA"}
    assert recorded.status("/v1/models", **headers) == 200


def test_no_request_is_lost_when_the_engine_closes_an_idle_connection(nginx_host):
    def serve(connection):
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            connection.recv(65536)  # uvicorn's idle time ends as the next request arrives

    engine = accepting(nginx_host.paths.engine_socket("main"), serve)
    with engine, running_gateway(nginx_host, engine=False) as client:
        assert [client.status("/v1/models") for _ in range(4)] == [200] * 4
