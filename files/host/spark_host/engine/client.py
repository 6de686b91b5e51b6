"""Talking to the engine: HTTP over its unix socket (or private port) with real deadlines."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from spark_contract.paths import Paths
from spark_contract.release import Release


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
        except ValueError as error:
            raise EngineError(f"the answer is not JSON: {self.body[:80]!r}") from error
        if not isinstance(value, dict):
            raise EngineError(f"the answer is not a JSON object: {self.body[:80]!r}")
        return value


class _Connection(HTTPConnection):
    def __init__(self, address: str | tuple[str, int], timeout_s: float):
        super().__init__("localhost", timeout=timeout_s)
        self._address = address

    def connect(self) -> None:
        if isinstance(self._address, str):
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._address)
        else:
            self.sock = socket.create_connection(self._address, self.timeout)


class Engine:
    """A client of one engine.

    Args:
        address: Path of a unix socket, or (host, port).
    """

    def __init__(self, address: str | tuple[str, int]):
        self.address = address

    @classmethod
    def of(cls, release: Release, paths: Paths) -> Engine:
        """Return the client for a release's engine."""
        return cls(str(paths.engine_socket(release.service)))

    def get(self, path: str, timeout_s: float = 10) -> Reply:
        """Send ``GET path``."""
        return self._request("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Reply:
        """Send ``POST path`` with a JSON body."""
        return self._request("POST", path, body, timeout_s)

    def chat(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer to a chat request; anything but 200 is an error."""
        reply = self.post("/v1/chat/completions", body, timeout_s)
        if reply.status != 200:
            raise EngineError(f"HTTP {reply.status}: {reply.body[:200].decode(errors='replace')}")
        return reply.json()

    def stream_chat(self, body: dict[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed chat answer; fail unless it ends with ``[DONE]``."""
        deadline = time.monotonic() + timeout_s
        connection, response = self._open("POST", "/v1/chat/completions", body, deadline)
        try:
            if response.status != 200:
                raise EngineError(f"HTTP {response.status}")
            for line in _lines(connection, response, deadline):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield Reply(200, line[6:]).json()
            raise EngineError("the stream ended without [DONE]")
        finally:
            connection.close()

    def metrics(self, timeout_s: float = 10) -> Metrics:
        """Return the engine's counters and gauges."""
        reply = self.get("/metrics", timeout_s)
        if reply.status != 200:
            raise EngineError(f"/metrics: HTTP {reply.status}")
        return Metrics.parse(reply.body.decode(errors="replace"))

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> Reply:
        deadline = time.monotonic() + timeout_s
        connection, response = self._open(method, path, body, deadline)
        try:
            return Reply(response.status, b"".join(_pieces(connection, response, deadline)))
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None, deadline: float
    ) -> tuple[_Connection, HTTPResponse]:
        connection = _Connection(self.address, _left(deadline))
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            connection.request(
                method, path, json.dumps(body) if body is not None else None, headers
            )
            _set_timeout(connection, deadline)
            return connection, connection.getresponse()
        except (ConnectionRefusedError, FileNotFoundError) as error:
            connection.close()
            raise NotListeningError("nobody listens on the engine's socket") from error
        except (TimeoutError, BlockingIOError) as error:  # the latter: its queue is full
            connection.close()
            raise SilentError(f"{method} {path}: no answer in time") from error
        except (OSError, HTTPException) as error:
            connection.close()
            raise EngineError(f"{method} {path}: {type(error).__name__}: {error}") from error


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise SilentError("no complete answer in time")
    return left


def _set_timeout(connection: _Connection, deadline: float) -> None:
    if connection.sock is not None:
        connection.sock.settimeout(_left(deadline))


def _pieces(connection: _Connection, response: HTTPResponse, deadline: float) -> Iterator[bytes]:
    # The deadline is set anew before each read: a trickle of bytes must not outlive it.
    try:
        while True:
            _set_timeout(connection, deadline)
            piece = response.read1(65536)
            if not piece:
                break
            yield piece
    except TimeoutError as error:
        raise SilentError("no complete answer in time") from error
    except (OSError, HTTPException, ValueError) as error:
        raise EngineError(f"the answer broke off: {type(error).__name__}: {error}") from error
    if response.length:
        raise EngineError(f"the answer broke off with {response.length} bytes missing")


def _lines(connection: _Connection, response: HTTPResponse, deadline: float) -> Iterator[bytes]:
    rest = b""
    for piece in _pieces(connection, response, deadline):
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
    if rest:
        yield rest


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the Prometheus text format."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """The engine's samples at one moment."""

    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Read the Prometheus text format; lines that are not samples are skipped."""
        found = []
        for line in text.splitlines():
            if not line or line.startswith("#"):
                continue
            head, _, value = line.rpartition(" ")
            name, _, labels = head.partition("{")
            try:
                found.append(Sample(name.strip(), _labels(labels.rstrip("}")), float(value)))
            except ValueError:
                continue
        return cls(tuple(found))

    def total(self, name: str) -> float | None:
        """Return the sum over all label sets; ``None`` when the name is absent."""
        values = [sample.value for sample in self.samples if sample.name == name]
        return sum(values) if values else None

    def has(self, name: str, labels: dict[str, str]) -> bool:
        """Return whether some sample of ``name`` carries these labels."""
        return any(
            sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items())
            for sample in self.samples
        )

    @property
    def running(self) -> float:
        """Requests the engine works on."""
        return self.total("vllm:num_requests_running") or 0.0

    @property
    def unfinished(self) -> float:
        """Requests running or waiting."""
        return self.running + (self.total("vllm:num_requests_waiting") or 0.0)

    @property
    def generated(self) -> float:
        """Tokens generated so far, for anybody."""
        return self.total("vllm:generation_tokens_total") or 0.0

    @property
    def tokens(self) -> float:
        """Prompt and generated tokens so far; a prompt counts when all of it was read."""
        names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
        return sum(self.total(name) or 0.0 for name in names)

    @property
    def progress(self) -> tuple[float, float]:
        """What moves while work is done; only ever compared with an earlier one.

        The tokens stand still while a long prompt is read in chunks. Each chunk takes blocks of the
        cache, so the share in use moves (seen on a GPU: docs/reference/engine-proofs.md).
        """
        return self.tokens, self.total("vllm:kv_cache_usage_perc") or 0.0


def _labels(text: str) -> dict[str, str]:
    labels = {}
    rest = text
    while rest:
        key, _, rest = rest.partition('="')
        value, _, rest = rest.partition('"')
        labels[key.strip(" ,")] = value
    return labels
