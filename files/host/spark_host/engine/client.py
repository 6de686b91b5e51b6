"""The client of the engine: HTTP over a unix socket, limited in bytes and in time.

The engine processes untrusted input, so answers may be endless, headers included: both limits
apply to every read.
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

from spark_host.engine.metrics import DEFAULT, Dialect, Metrics, dialect_of
from spark_host.system import folders

# Far above the size of a long answer, a list of models or a page of metrics.
_ANSWER_BYTES = 16 << 20
_METRICS_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 16


class EngineError(Exception):
    """The engine did not answer, or the answer is an error or malformed."""


class SilentError(EngineError):
    """The engine accepted the request, or the queue is full, and the time is over."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete HTTP answer."""

    status: int
    body: bytes

    def json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"the answer is not JSON: {self.body[:80]!r}") from error
        if not isinstance(value, dict):
            raise EngineError(f"the answer is not a JSON object: {self.body[:80]!r}")
        return value


class _Reader(io.RawIOBase):
    """Reads from a socket up to a limit of bytes and a deadline."""

    def __init__(self, source: socket.socket, limit_bytes: int, deadline: float):
        self._source, self._limit_bytes, self._deadline = source, limit_bytes, deadline
        self._left_bytes = limit_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # Before each read: a trickle of bytes must not outlive the deadline.
        self._source.settimeout(_seconds_left(self._deadline))
        count = self._source.recv_into(buffer)
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise EngineError(f"the answer is longer than {self._limit_bytes} bytes")
        return count


class _Response(HTTPResponse):
    """An HTTP response that is read through a :class:`_Reader`."""

    def __init__(self, source: socket.socket, limit_bytes: int, deadline: float, method: str):
        super().__init__(source, method=method)
        self.fp.close()
        self.fp = io.BufferedReader(_Reader(source, limit_bytes, deadline), _CHUNK_BYTES)


class _Connection(HTTPConnection):
    """HTTP over a unix socket; refuses anything that is not a socket."""

    def __init__(self, path: Path, timeout_s: float):
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        with folders.opened_socket(self._path) as held:
            self.sock.connect(held)


class Engine:
    def __init__(self, socket_path: Path, dialect: Dialect = DEFAULT):
        self._path = socket_path
        self._dialect = dialect

    @classmethod
    def of(cls, release: Release, paths: Paths) -> Engine:
        return cls(paths.engine_socket(release.service), dialect_of(release))

    def get(self, path: str, timeout_s: float = 10, limit_bytes: int = _ANSWER_BYTES) -> Reply:
        return self._request("GET", path, None, timeout_s, limit_bytes)

    def ask(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send ``POST path`` with a JSON body and return the JSON answer; expects status 200."""
        reply = self._request("POST", path, body, timeout_s, _ANSWER_BYTES)
        if reply.status != 200:
            raise EngineError(f"HTTP {reply.status}: {reply.body[:200].decode(errors='replace')}")
        return reply.json()

    def stream_chat(
        self, body: dict[str, Any], timeout_s: float, path: str = CHAT
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer, which must end with ``[DONE]``."""
        deadline = time.monotonic() + timeout_s
        connection, response = self._open("POST", path, body, deadline, _ANSWER_BYTES)
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
        reply = self.get("/metrics", timeout_s, _METRICS_BYTES)
        if reply.status != 200:
            raise EngineError(f"/metrics: HTTP {reply.status}")
        return Metrics.parse(reply.body.decode(errors="replace"), self._dialect)

    def _request(
        self, method: str, path: str, body: object, timeout_s: float, limit_bytes: int
    ) -> Reply:
        deadline = time.monotonic() + timeout_s
        connection, response = self._open(method, path, body, deadline, limit_bytes)
        try:
            return Reply(response.status, b"".join(_chunks(response)))
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: object, deadline: float, limit_bytes: int
    ) -> tuple[_Connection, _Response]:
        connection = _Connection(self._path, _seconds_left(deadline))
        text, headers = None, {}
        if body is not None:
            text, headers = json.dumps(body), {"Content-Type": "application/json"}
        try:
            with ExitStack() as on_error:
                on_error.callback(connection.close)
                connection.request(method, path, text, headers)
                response = _Response(connection.sock, limit_bytes, deadline, method)
                response.begin()
                on_error.pop_all()
        except (ConnectionRefusedError, FileNotFoundError) as error:
            # vLLM listens only after it has loaded the model.
            raise EngineError("nothing listens on the engine's socket") from error
        except (TimeoutError, BlockingIOError) as error:  # the latter: a full queue
            raise SilentError(f"{method} {path}: no answer in time") from error
        except (OSError, HTTPException, HostToolError, ValueError) as error:
            raise EngineError(f"{method} {path}: {type(error).__name__}: {error}") from error
        return connection, response


def _seconds_left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise SilentError("no complete answer in time")
    return seconds


def _chunks(response: _Response) -> Iterator[bytes]:
    try:
        while chunk := response.read1(_CHUNK_BYTES):
            yield chunk
    except TimeoutError as error:
        raise SilentError("no complete answer in time") from error
    except (OSError, HTTPException, ValueError) as error:
        raise EngineError(f"the answer broke off: {type(error).__name__}: {error}") from error
    if response.length:
        raise EngineError(f"the answer broke off with {response.length} bytes missing")


def _lines(response: _Response) -> Iterator[bytes]:
    rest = b""
    for chunk in _chunks(response):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
    if rest:
        yield rest
