"""Only allowed paths reach the engine, in any spelling."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from recorder import Recorder, recording
from stub_gateway import Door, running
from stub_host import REPOSITORY, Host

# Allowed methods and targets in the engine's requests.
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
# A request of each allowed kind.
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


@dataclass
class Watched:
    """A gateway before a recorder."""

    door: Door
    recorder: Recorder

    def send(self, request: bytes) -> bytes:
        """Send bytes as they are and return the answer."""
        with socket.create_connection(("127.0.0.1", self.door.settings.port), 2) as connection:
            connection.sendall(request)
            answer = b""
            try:
                while piece := connection.recv(65536):
                    answer += piece
            except (ConnectionResetError, TimeoutError):  # the latter for another request
                pass
            return answer


@pytest.fixture
def watched(host: Host, nginx_program: Path) -> Iterator[Watched]:
    (host.paths.root / "usr/sbin").mkdir(parents=True)
    (host.paths.root / "usr/sbin/nginx").symlink_to(nginx_program)
    with recording(host.paths.engine_socket("main")) as recorder, running(host, engine=False) as d:
        yield Watched(d, recorder)


def spellings(path: str) -> Iterator[str]:
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
        ways = ("..", "%2e%2e", ".%2e", "..%2f..", "%2e%2e%2f", "..;", "..%5c..", "../..", "....")
        for way in ways:
            yield f"{other}/{way}{path}"
            yield f"{path}/{way}{other}"


def corpus() -> list[tuple[str, str]]:
    allowed = [line.split(" ", 1)[1] for line in ALLOWED]
    listed = (REPOSITORY / "tests/fixtures/engine-routes-0.32.0.txt").read_text().splitlines()
    routes = [line.split()[0].replace("{response_id}", "resp_1") for line in listed]
    plain = itertools.product(METHODS, dict.fromkeys([*allowed, *routes, *HIDDEN, "*", "/"]))
    bent = [
        (method, target)
        for path in (*HIDDEN, "/health", "/v1/models", "/v1/responses/resp_1/cancel")
        for target in spellings(path)
        for method in ("GET", "POST")
    ]
    return list(dict.fromkeys([*plain, *bent]))


def request(method: str, target: str, key: str | None, body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    lines += [f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def test_only_allowed_path_spellings_reach_the_engine(
    watched: Watched,
) -> None:
    asked = corpus()
    for method, target in asked:
        watched.send(request(method, target, None))
    without = watched.recorder.taken()
    assert {line for line in without if not KEYLESS.fullmatch(line)} == set()
    assert "GET /health HTTP/1.1" in without

    key = watched.door.key
    for method, target in asked:
        watched.send(request(method, target, key))
    reached = watched.recorder.taken()
    assert {line for line in reached if not WITH_KEY.fullmatch(line)} == set()
    # An encoded dot or letter is the same path, and is forwarded in plain form.
    wanted = {re.sub("/v1/(classify|pooling)", r"/\1", line) for line in ALLOWED}
    assert {line.removesuffix(" HTTP/1.1") for line in reached} >= wanted
    assert 2 * len(asked) >= 2000


def test_headers_and_query_do_not_change_the_route(watched: Watched) -> None:
    key = watched.door.key
    bodies = (b"", b"{}", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    for method, target in [line.split(" ", 1) for line in ALLOWED]:
        for body in bodies:
            watched.send(request(method, target, key, body) + request("GET", "/metrics", key))
    smuggled = [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1",
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + request("GET", "/metrics", key),
        b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n" + request("GET", "/metrics", key),
        b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n" + request("GET", "/metrics", key),
        b"X-Original-URL: /metrics\r\nX-Rewrite-URL: /metrics\r\n\r\n",
    ]
    for rest in smuggled:
        first = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\n".encode()
        watched.send(first + rest + b"\r\n\r\n")
    reached = watched.recorder.taken()
    assert {line for line in reached if not WITH_KEY.fullmatch(line)} == set()
    assert [line for line in reached if "metrics" in line] == []
    assert len(reached) >= len(ALLOWED)


@pytest.mark.parametrize(
    "target",
    [
        *("/metrics/../health", "/metrics/%2e%2e/health", "/metrics//..//health", "//health"),
        *("/./health", "/%68ealth", "/tokenize/..%2fhealth", "/health?/../metrics"),
    ],
)
def test_only_health_works_without_a_key(watched: Watched, target: str) -> None:
    watched.send(request("GET", target, None))
    assert set(watched.recorder.taken()) <= {"GET /health HTTP/1.1"}
