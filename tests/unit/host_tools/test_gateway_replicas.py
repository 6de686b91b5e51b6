import json
import socket
import threading
import time
from contextlib import ExitStack
from http.server import ThreadingHTTPServer

import pytest
from gateway_client import CHAT, OWN_KEY, QUESTION, free_port, open_service, running_gateway
from socket_servers import SilentHandler
from spark_host.gateway import gateway, nginx

LOST = 0


class OtherGateway(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.requests: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()


class Handler(SilentHandler):
    protocol_version = "HTTP/1.1"
    server: OtherGateway

    def do_POST(self):  # noqa: N802
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(f"{self.path} {self.headers['Authorization']}")
        self.server.may_answer.wait(10)
        body = b'{"from": "the other"}'
        if self.server.status == LOST:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Replicas:
    def __init__(self, client, other, port):
        self.client, self.other, self.port = client, other, port

    def ask(self, key=OWN_KEY, **headers):
        return self.client.ask(CHAT, QUESTION, key=key, port=self.port, **headers)

    def answering_hosts(self, requests, **headers):
        answers = [self.ask(**headers) for _ in range(requests)]
        assert {status for status, _ in answers} == {200}
        return ["other" if b"the other" in text else "own" for _, text in answers]

    def close_own(self):
        gateway.close_traffic("main", self.client.host.paths)


@pytest.fixture
def replicas(nginx_host):
    with ExitStack() as stack:
        other = stack.enter_context(OtherGateway())
        threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
        stack.callback(other.shutdown)
        others = [f"127.0.0.1:{other.server_port}", "no.such.host.invalid:1"]
        settings = {"port": free_port(), "others": others}
        client = stack.enter_context(
            running_gateway(nginx_host, replicas=settings, max_requests_per_s=50)
        )
        yield Replicas(client, other, settings["port"])


def test_balances_requests_and_forwards_the_key(replicas):
    assert set(replicas.answering_hosts(6)) == {"own", "other"}
    assert set(replicas.other.requests) == {f"{CHAT} Bearer {replicas.client.key}"}


CONVERSATION_HEADERS = (
    "X_Session_Id", "x_session_affinity", "X_Conversation_Id", "X_Claude_Code_Session_Id",
    "X_OpenWebUI_Chat_Id",
)  # fmt: skip


@pytest.mark.parametrize("header", CONVERSATION_HEADERS)
def test_all_requests_of_a_conversation_go_to_the_same_host(replicas, header):
    hosts = [set(replicas.answering_hosts(3, **{header: f"chat-{n}"})) for n in range(12)]
    assert {len(names) for names in hosts} == {1}
    assert set.union(*hosts) == {"own", "other"}


def test_conversation_moves_while_its_host_is_closed_and_then_returns(replicas):
    chats = [f"chat-{n}" for n in range(12)]
    home = {chat: replicas.answering_hosts(1, X_Session_Id=chat) for chat in chats}
    replicas.close_own()
    for chat in chats:
        assert replicas.answering_hosts(2, X_Session_Id=chat) == ["other"] * 2
    open_service(replicas.client.host, "main")
    time.sleep(3.1)
    assert {chat: replicas.answering_hosts(1, X_Session_Id=chat) for chat in chats} == home


def test_prefers_the_least_busy_host(replicas):
    replicas.other.may_answer.clear()
    while not replicas.other.requests:
        waiting = threading.Thread(target=replicas.ask)
        waiting.start()
        waiting.join(1)
    assert replicas.answering_hosts(5) == ["own"] * 5
    replicas.other.may_answer.set()
    waiting.join()


@pytest.mark.parametrize("status", [503, LOST])
def test_retries_requests_that_a_lost_host_did_not_answer(replicas, status):
    replicas.other.status = status
    assert replicas.answering_hosts(6) == ["own"] * 6
    assert replicas.other.requests


@pytest.mark.parametrize("status", [500, 401])
def test_does_not_retry_a_started_response(replicas, status):
    replicas.close_own()
    replicas.other.status = status
    assert replicas.ask()[0] == status
    assert len(replicas.other.requests) == 1


def test_keeps_the_known_addresses_of_replicas_while_names_cannot_be_resolved(
    replicas, monkeypatch
):
    def fail(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    paths = replicas.client.host.paths
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", fail)  # as in the watchdog, which has no network
        assert gateway.is_current(replicas.client.settings, paths)
        (paths.gateway_run("main") / "nginx.conf").unlink()  # as after a reboot
        gateway.reload("main", paths)
    assert set(replicas.answering_hosts(6)) == {"own", "other"}


def test_tailnet_replicas_are_reached_over_ipv4_where_gateways_listen(host, monkeypatch):
    def resolve(name, port, family=0, type=0):
        v6 = (socket.AF_INET6, type, 6, "", ("fd7a:115c:a1e0::2", 0, 0, 0))
        v4 = (socket.AF_INET, type, 6, "", ("100.64.0.2", 0))
        return [result for result in (v6, v4) if family in (0, result[0])]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    replicas = {"port": 8008, "others": ["spark-2.example.ts.net:8000"]}
    settings = host.gateway(expose="tailscale", replicas=replicas)
    assert "server 100.64.0.2:8000 " in nginx.render_config(settings, host.paths)


def test_rejects_a_wrong_key(replicas):
    assert replicas.ask("wrong")[0] == 401
    assert replicas.other.requests == []


def test_returns_503_if_no_replica_is_available(replicas):
    replicas.other.status = 503
    replicas.close_own()
    for _ in range(3):
        status, text = replicas.ask()
        assert status == 503
        assert b"the other" in text or "available" in json.loads(text)["error"]["message"]


@pytest.mark.slow
def test_counts_a_request_once_against_the_limits(replicas):
    replicas.other.status = 503
    assert {replicas.ask()[0] for _ in range(40)} == {200}


@pytest.mark.slow
def test_replica_gateway_also_answers_from_its_own_engine(replicas):
    assert b"data: " in replicas.client.start_long_answer().read()
    assert replicas.other.requests == []
