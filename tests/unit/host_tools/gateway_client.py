"""A real nginx as the gateway of a stub host, and its client."""

import http.client
import json
import os
import random
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from socket_servers import accepting
from spark_contract.documents import to_json
from spark_contract.gateway import Gateway
from spark_host.gateway import gateway
from spark_host.system import host as system
from stub_host import Host

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


@dataclass
class RecordingEngine:
    lines: list[str] = field(default_factory=list)
    body_sizes: list[int] = field(default_factory=list)
    last_body: bytes = b""
    answer: bytes = b"ok"
    may_answer: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    def take_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as request:
            head = b""
            while (line := request.readline()) not in (b"\r\n", b""):
                head += line
            if not head:
                return
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            self.lines.append(head.partition(b"\r\n")[0].decode("latin-1"))
            self.last_body = request.read(int(length[1]) if length else 0)
            self.body_sizes.append(len(self.last_body))
            self.may_answer.wait(20)
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(HEAD % len(self.answer) + self.answer)


@contextmanager
def recording(path: Path) -> Iterator[RecordingEngine]:
    engine = RecordingEngine()
    with accepting(path, engine.serve):
        yield engine
        engine.may_answer.set()


CHAT = "/v1/chat/completions"
MIB = 1 << 20
QUESTION = {"model": "main-model", "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
NAMES = {"main": ["main-model", "alias"], "embed": ["embedder"], "rank": ["org/ranker", "ranker"]}
OWN_KEY = "the gateway's key"


@dataclass
class GatewayClient:
    host: Host
    process: subprocess.Popen[bytes]
    engines: dict[str, RecordingEngine] = field(default_factory=dict)

    @property
    def settings(self) -> Gateway:
        return system.load_gateway("main", self.host.paths)

    @property
    def key(self) -> str:
        return gateway.read_key(self.settings, self.host.paths)

    def send(
        self, path: str, body: object = None, method: str | None = None, *,
        key: str | None = OWN_KEY, port: int | None = None, **headers: str,
    ) -> http.client.HTTPResponse:  # fmt: skip
        data = body if isinstance(body, (bytes, Iterator, type(None))) else json.dumps(body)
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            fields["Authorization"] = f"Bearer {self.key if key == OWN_KEY else key}"
        address = ("127.0.0.1", port or self.settings.port)
        connection = http.client.HTTPConnection(*address, timeout=120)
        method = method or ("GET" if data is None else "POST")
        connection.request(method, path, data, fields, encode_chunked=isinstance(data, Iterator))
        return connection.getresponse()

    def ask(self, path: str, body: object = None, *args: Any, **options: Any) -> tuple[int, bytes]:
        with self.send(path, body, *args, **options) as answer:
            return answer.status, answer.read()

    def status(self, path: str, body: object = None, *args: Any, **options: Any) -> int:
        return self.ask(path, body, *args, **options)[0]

    def received(self) -> dict[str, list[str]]:
        return {
            service: [line.split()[1] for line in lines]
            for service, engine in self.engines.items()
            if (lines := engine.take_lines())
        }

    def start_long_answer(self) -> http.client.HTTPResponse:
        messages = [{"role": "user", "content": "Repeat exactly: " + "abcd" * 40}]
        answer = self.send(CHAT, {**QUESTION, "stream": True, "messages": messages})
        assert answer.readline().startswith(b"data: ")
        return answer


def open_service(
    host: Host, service: str, digest: str = "0123456789ab", names: list[str] | None = None
) -> None:
    names = names or NAMES[service]
    release = host.release(f"{service}-{digest}", service=service, names=names)
    gateway.open_traffic(release, host.paths)


def free_port() -> int:
    for port in random.sample(range(20000, 32000), 50):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")


class _Exec(Exception):  # noqa: N818 - no error
    """The process would become another program."""


def read_exec_command(run: Callable[[], int], **environment: str) -> list[str]:
    def execv(program: str, words: list[str]) -> None:
        raise _Exec(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "execv", execv)
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(_Exec) as command:
            run()
    return list(command.value.args)


@contextmanager
def running_gateway(
    host: Host, *, engine: bool = True, command: list[str] | None = None, **settings: Any
) -> Iterator[GatewayClient]:
    document = host.gateway(port=free_port(), **settings)
    release = host.release()
    if engine:
        host.started(release, STUB_PIECE_S="0.05")
    gateway.create_missing_key(document, host.paths)
    gateway.open_traffic(release, host.paths)
    run = command or read_exec_command(lambda: gateway.run("main", host.paths))
    process = subprocess.Popen(run)
    try:
        gateway.wait_until_listening("main", host.paths)
        yield GatewayClient(host, process)
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def recording_gateway(
    host: Host, services: tuple[str, ...] = ("main",), **settings: Any
) -> Iterator[GatewayClient]:
    with ExitStack() as stack:
        engines = {
            service: stack.enter_context(recording(host.paths.engine_socket(service)))
            for service in services
        }
        for service in services[1:]:
            document = replace(host.gateway(), service=service, port=18081)
            host.paths.gateway_settings(service).write_text(to_json(document))
            open_service(host, service)
        client = stack.enter_context(running_gateway(host, engine=False, **settings))
        client.engines = engines
        yield client
