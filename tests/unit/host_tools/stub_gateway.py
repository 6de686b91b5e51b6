"""A real nginx before a stub engine, and how to knock at it."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from spark_contract.gateway import Gateway
from spark_host.gateway import gateway, traffic
from spark_host.system import host as system
from stub_host import REPOSITORY, Host

QUESTION = {
    "model": "main-model",
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
}


@dataclass
class Door:
    """A running gateway and how to knock at it."""

    host: Host
    process: subprocess.Popen[bytes]

    @property
    def settings(self) -> Gateway:
        return system.load_gateway("main", self.host.paths)

    @property
    def key(self) -> str:
        return gateway.read_key(self.settings, self.host.paths)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.settings.port, timeout=10)

    def ask(
        self, path: str, body: object = None, method: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = self.connect()
        names = {key.replace("_", "-"): value for key, value in headers.items()}
        text = json.dumps(body) if body is not None else None
        connection.request(method or ("POST" if text else "GET"), path, text, names)
        answer = connection.getresponse()
        result = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return result

    def chat(self, **headers: str) -> int:
        return self.ask("/v1/chat/completions", QUESTION, **headers)[0]


def free_port() -> int:
    for port in random.sample(range(20000, 32000), 50):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")


def long_answer(gate: Door) -> http.client.HTTPResponse:
    body = {
        **QUESTION,
        "stream": True,
        "messages": [{"role": "user", "content": "Repeat exactly: " + "abcd" * 40}],
    }
    connection = gate.connect()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {gate.key}"}
    )
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    return answer


class _Became(Exception):  # noqa: N818 - no error
    """A verb of the tool would be another program from here on."""


def becomes(run: Callable[[], int], **environment: str) -> list[str]:

    def execv(program: str, words: list[str]) -> None:
        raise _Became(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "execv", execv)
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(_Became) as became:
            run()
    return list(became.value.args)


def as_a_unit_does(host: Host) -> list[str]:
    """Return the command of the gateway's unit."""
    homes = f"PYTHONPATH={REPOSITORY}/files/host:{REPOSITORY}/files/contract"
    tool = [sys.executable, "-m", "spark_host", "gateway", "main"]
    return ["env", homes, f"SPARK_ROOT={host.paths.root}", *tool]


@contextmanager
def running(
    host: Host, *, engine: bool = True, command: list[str] | None = None, **changes: Any
) -> Iterator[Door]:
    settings = host.gateway(port=free_port(), **changes)
    release = host.release()
    if engine:
        host.started(release, STUB_PIECE_S="0.05")
    gateway.make_key(settings, host.paths)
    traffic.open_for(release, host.paths)
    process = subprocess.Popen(command or becomes(lambda: gateway.run("main", host.paths)))
    try:
        gateway.wait_until_listening("main", host.paths)
        yield Door(host, process)
    finally:
        process.terminate()
        process.wait(10)
