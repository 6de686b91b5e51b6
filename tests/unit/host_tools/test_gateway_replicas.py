"""An address for several hosts: a real nginx, the stub engine, and another gateway."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from spark_host.gateway import traffic
from stub_gateway import QUESTION, Door, free_port, long_answer, running
from stub_host import Host

PATH = "/v1/chat/completions"


class Other(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.status = 200
        self.asked: list[str] = []
        self.hold = threading.Event()
        self.hold.set()


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        pass

    def do_POST(self) -> None:
        other = self.server
        assert isinstance(other, Other)
        self.rfile.read(int(self.headers["Content-Length"]))
        other.asked.append(f"{self.path} {self.headers['Authorization']}")
        other.hold.wait(10)
        body = b'{"from": "the other"}'
        if other.status == 0:  # the host is lost before it answers
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send_response(other.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Two:
    """A gateway with a balancer, and the gateway of another host."""

    def __init__(self, door: Door, other: Other, port: int):
        self.door, self.other, self.port = door, other, port

    def ask(self, key: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        headers = {"Authorization": f"Bearer {key or self.door.key}"}
        connection.request("POST", PATH, json.dumps(QUESTION), headers)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found

    def who(self) -> str:
        status, text = self.ask()
        assert status == 200, text
        return "other" if "the other" in text else "own"


@pytest.fixture
def two(host: Host, nginx_program: Path) -> Iterator[Two]:
    (host.paths.root / "usr/sbin").mkdir(parents=True)
    (host.paths.root / "usr/sbin/nginx").symlink_to(nginx_program)
    with ExitStack() as stack:
        other = stack.enter_context(Other())
        serving = threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True)
        serving.start()
        stack.callback(other.shutdown)
        port = free_port()
        replicas = {
            "port": port,
            "others": [f"127.0.0.1:{other.server_port}", "no.such.host.invalid:1"],
        }
        door = stack.enter_context(running(host, replicas=replicas, max_requests_per_s=50))
        yield Two(door, other, port)


def test_balancer_forwards_the_clients_key(two: Two) -> None:
    assert {two.who() for _ in range(6)} == {"own", "other"}
    assert set(two.other.asked) == {f"{PATH} Bearer {two.door.key}"}


def test_balancer_prefers_the_least_busy_host(two: Two) -> None:
    two.other.hold.clear()
    busy: list[threading.Thread] = []
    while not two.other.asked:
        busy.append(threading.Thread(target=two.ask))
        busy[-1].start()
        busy[-1].join(1)  # only the second replica has it
    assert [two.who() for _ in range(5)] == ["own"] * 5
    two.other.hold.set()
    busy[-1].join()


def test_closed_host_loses_no_request(two: Two) -> None:
    traffic.close("main", two.door.host.paths)
    assert [two.who() for _ in range(6)] == ["other"] * 6


@pytest.mark.parametrize("status", [503, 0])
def test_lost_replica_loses_no_unanswered_request(two: Two, status: int) -> None:
    two.other.status = status
    assert [two.who() for _ in range(6)] == ["own"] * 6
    assert two.other.asked


def test_started_answer_is_not_retried(two: Two) -> None:
    traffic.close("main", two.door.host.paths)
    two.other.status = 500
    assert two.ask()[0] == 500
    assert len(two.other.asked) == 1


def test_no_open_replica_returns_503(two: Two) -> None:
    two.other.status = 503
    traffic.close("main", two.door.host.paths)
    for _ in range(3):
        status, text = two.ask()
        assert status == 503
        assert "the other" in text or "available" in json.loads(text)["error"]["message"]


def test_every_replica_refuses_a_wrong_key(two: Two) -> None:
    traffic.close("main", two.door.host.paths)
    two.other.status = 401
    assert two.ask("wrong")[0] == 401


@pytest.mark.slow
def test_balancer_limits_count_a_client_once(two: Two) -> None:
    two.other.status = 503
    refused = [two.ask()[0] for _ in range(40)]
    assert set(refused) == {200}  # 100 at once are let through; counted twice they would be 80


def test_gateway_port_still_serves_locally(two: Two) -> None:
    answer = long_answer(two.door)
    assert b"data: " in answer.read()
    assert two.other.asked == []
