"""Talking to the engine: HTTP over its unix socket, each answer bounded in bytes and in time.

The engine runs what strangers sent it, so whatever it says may be without end, in the head of an
answer as in its body: every read counts against the same two limits.
"""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.release import CHAT, Release

from spark_host.engine import metrics
from spark_host.engine.metrics import USUAL, Dialect, Metrics
from spark_host.system import folders

# Far above what a long answer, a list of models or a page of counters takes.
_ANSWER_BYTES = 16 << 20
_METRICS_BYTES = 4 << 20
_PIECE_BYTES = 1 << 16


class EngineError(Exception):
    """The engine did not answer, answered with an error status, or answered nonsense."""


class NotListeningError(EngineError):
    """Nobody accepts connections: vLLM listens only once the model is loaded."""


class SilentError(EngineError):
    """The engine took the request, or has room for none, and said nothing until the time was up."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer."""

    status: int
    body: bytes

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"the answer is not JSON: {self.body[:80]!r}") from error
        if not isinstance(value, dict):
            raise EngineError(f"the answer is not a JSON object: {self.body[:80]!r}")
        return value


class _Reader(io.RawIOBase):
    """Reads of a socket until so many bytes came or the time is up, whichever is first."""

    def __init__(self, source: socket.socket, limit_bytes: int, deadline: float):
        self._source, self._limit_bytes, self._deadline = source, limit_bytes, deadline
        self._left_bytes = limit_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # The time-out is set anew before each read: a trickle of bytes must not outlive it.
        self._source.settimeout(_left(self._deadline))
        count = self._source.recv_into(buffer)
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise EngineError(f"the answer is longer than {self._limit_bytes} bytes")
        return count


class _Response(HTTPResponse):
    """An answer that is read through a :class:`_Reader`."""

    def __init__(self, source: socket.socket, limit_bytes: int, deadline: float, method: str):
        super().__init__(source, method=method)
        self.fp.close()
        reader = _Reader(source, limit_bytes, deadline)
        self.fp = io.BufferedReader(reader, _PIECE_BYTES)


class _Connection(HTTPConnection):
    """HTTP over a unix socket; what lies in its place and is no socket is not connected to."""

    def __init__(self, path: Path, timeout_s: float):
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        with folders.held_socket(self._path) as held:
            self.sock.connect(held)


class Engine:
    """A client of the engine behind one unix socket."""

    def __init__(self, socket_path: Path, words: Dialect = USUAL):
        self._path = socket_path
        self._words = words

    @classmethod
    def of(cls, release: Release, paths: Paths) -> Engine:
        """Return the client for a release's engine."""
        return cls(paths.engine_socket(release.service), metrics.of(release))

    def get(self, path: str, timeout_s: float = 10) -> Reply:
        """Send ``GET path``."""
        return self._request("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Reply:
        """Send ``POST path`` with a JSON body."""
        return self._request("POST", path, body, timeout_s)

    def ask(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer to a request; anything but 200 is an error."""
        reply = self.post(path, body, timeout_s)
        if reply.status != 200:
            raise EngineError(f"HTTP {reply.status}: {reply.body[:200].decode(errors='replace')}")
        return reply.json()

    def stream_chat(
        self, body: dict[str, Any], timeout_s: float, path: str = CHAT
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer; fail unless it ends with ``[DONE]``."""
        deadline = time.monotonic() + timeout_s
        connection, response = self._open("POST", path, body, deadline)
        try:
            if response.status != 200:
                raise EngineError(f"HTTP {response.status}")
            for line in _lines(response):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield Reply(200, line[6:]).json()
            raise EngineError("the stream ended without [DONE]")
        finally:
            connection.close()

    def metrics(self, timeout_s: float = 10) -> Metrics:
        """Return the engine's counters and gauges."""
        reply = self._request("GET", "/metrics", None, timeout_s, _METRICS_BYTES)
        if reply.status != 200:
            raise EngineError(f"/metrics: HTTP {reply.status}")
        return Metrics.parse(reply.body.decode(errors="replace"), self._words)

    def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout_s: float,
        limit_bytes: int = _ANSWER_BYTES,
    ) -> Reply:
        deadline = time.monotonic() + timeout_s
        connection, response = self._open(method, path, body, deadline, limit_bytes)
        try:
            return Reply(response.status, b"".join(_pieces(response)))
        finally:
            connection.close()

    def _open(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        deadline: float,
        limit_bytes: int = _ANSWER_BYTES,
    ) -> tuple[_Connection, _Response]:
        connection = _Connection(self._path, _left(deadline))
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            with ExitStack() as closing:
                closing.callback(connection.close)
                connection.request(
                    method, path, json.dumps(body) if body is not None else None, headers
                )
                response = _Response(connection.sock, limit_bytes, deadline, method)
                response.begin()
                closing.pop_all()
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise NotListeningError("nobody listens on the engine's socket") from error
        except (TimeoutError, BlockingIOError) as error:  # the latter: its queue is full
            raise SilentError(f"{method} {path}: no answer in time") from error
        except (OSError, HTTPException, HostToolError, ValueError) as error:
            raise EngineError(f"{method} {path}: {type(error).__name__}: {error}") from error
        return connection, response


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise SilentError("no complete answer in time")
    return left


def _pieces(response: _Response) -> Iterator[bytes]:
    try:
        while piece := response.read1(_PIECE_BYTES):
            yield piece
    except TimeoutError as error:
        raise SilentError("no complete answer in time") from error
    except (OSError, HTTPException, ValueError) as error:
        raise EngineError(f"the answer broke off: {type(error).__name__}: {error}") from error
    if response.length:
        raise EngineError(f"the answer broke off with {response.length} bytes missing")


def _lines(response: _Response) -> Iterator[bytes]:
    rest = b""
    for piece in _pieces(response):
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
    if rest:
        yield rest
