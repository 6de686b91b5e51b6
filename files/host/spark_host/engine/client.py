"""HTTP client for the engine's unix socket, and parser of the engine's metrics.

The engine processes untrusted input, so bytes and time are limited, even for headers.
"""

import io
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from spark_contract.paths import Paths
from spark_contract.release import CHAT, Release
from spark_contract.tool import HostToolError

from spark_host.system import folders

# vLLM prints a few hundred samples.
_MAX_SAMPLES = 20_000
_MAX_LINE = 4096
_RESPONSE_BYTES = 16 << 20
_METRICS_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 16
GENERATED_TOKENS = "vllm:generation_tokens_total"


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        samples: list[Sample] = []
        for raw_line in io.StringIO(text):  # not a list: a hostile engine may send millions
            line = raw_line.rstrip("\r\n")
            if not line or line.startswith("#") or len(line) > _MAX_LINE:
                continue
            if len(samples) == _MAX_SAMPLES:
                break
            head, _, value = line.rpartition(" ")
            name, _, label_text = head.partition("{")
            labels = _parse_labels(label_text.rstrip("}"))
            with suppress(ValueError):
                samples.append(Sample(name.strip(), labels, float(value)))
        return cls(tuple(samples))

    def total(self, name: str) -> float | None:
        values = [sample.value for sample in self.samples if sample.name == name]
        return sum(values) if values else None

    def has(self, name: str, labels: dict[str, str]) -> bool:
        samples = (sample for sample in self.samples if sample.name == name)
        return any(labels.items() <= sample.labels.items() for sample in samples)

    @property
    def running(self) -> float:
        return self.total("vllm:num_requests_running") or 0.0

    @property
    def unfinished(self) -> float:
        return self.running + (self.total("vllm:num_requests_waiting") or 0.0)

    @property
    def generated(self) -> float:
        return self.total(GENERATED_TOKENS) or 0.0

    @property
    def tokens(self) -> float:
        return self.generated + (self.total("vllm:prompt_tokens_total") or 0.0)

    @property
    def drafted(self) -> float | None:
        return self.total("vllm:spec_decode_num_draft_tokens_total")

    @property
    def accepted(self) -> float | None:
        return self.total("vllm:spec_decode_num_accepted_tokens_total")

    @property
    def prefix_hits(self) -> float | None:
        return self.total("vllm:prefix_cache_hits_total")

    @property
    def progress(self) -> tuple[float, float]:
        """Return two numbers, at least one of which changes while the engine works.

        Token counters do not change during a chunked prefill, but the cache usage grows
        (proofs/engine-proofs.md).
        """
        return self.tokens, self.total("vllm:kv_cache_usage_perc") or 0.0


def _parse_labels(text: str) -> dict[str, str]:
    labels = {}
    rest = text
    while rest:
        key, _, rest = rest.partition('="')
        value, _, rest = rest.partition('"')
        labels[key.strip(" ,")] = value
    return labels


class EngineError(Exception):
    """The engine sent no response, an error or a malformed response."""


class EngineTimeoutError(EngineError):
    """The engine is listening, but did not send a complete response in time."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes

    def json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"the response is not JSON: {self.body[:80]!r}") from error
        if not isinstance(value, dict):
            raise EngineError(f"the response is not a JSON object: {self.body[:80]!r}")
        return value


class _Reader(io.RawIOBase):
    def __init__(self, source: socket.socket, limit_bytes: int, deadline: float):
        self._source, self._limit_bytes, self._deadline = source, limit_bytes, deadline
        self._remaining_bytes = limit_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # An engine that sends single bytes slowly must not extend the deadline.
        self._source.settimeout(_remaining_s(self._deadline))
        count = self._source.recv_into(buffer)
        self._remaining_bytes -= count
        if self._remaining_bytes < 0:
            raise EngineError(f"the response is longer than {self._limit_bytes} bytes")
        return count


class _Response(HTTPResponse):
    def __init__(self, source: socket.socket, limit_bytes: int, deadline: float, method: str):
        super().__init__(source, method=method)
        self.fp.close()  # this file has no limits
        self.fp = io.BufferedReader(_Reader(source, limit_bytes, deadline), _CHUNK_BYTES)


class _Connection(HTTPConnection):
    """HTTP over a unix socket; rejects any path that is not a socket."""

    def __init__(self, path: Path, timeout_s: float):
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        with folders.opened_socket(self._path) as address:
            self.sock.connect(address)


class Engine:
    def __init__(self, socket_path: Path):
        self._path = socket_path

    @classmethod
    def for_release(cls, release: Release, paths: Paths) -> "Engine":
        return cls(paths.engine_socket(release.service))

    def get(self, path: str, timeout_s: float = 10, limit_bytes: int = _RESPONSE_BYTES) -> Reply:
        return self._request("GET", path, None, timeout_s, limit_bytes)

    def ask(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """POST a JSON body and return the JSON response; raise EngineError unless it is OK."""
        reply = self._request("POST", path, body, timeout_s, _RESPONSE_BYTES)
        if reply.status != 200:
            raise EngineError(f"HTTP {reply.status}: {reply.body[:200].decode(errors='replace')}")
        return reply.json()

    def stream_chat(
        self, body: dict[str, Any], timeout_s: float, path: str = CHAT
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed response, which must end with ``[DONE]``."""
        deadline = time.monotonic() + timeout_s
        connection, response = self._open("POST", path, body, deadline, _RESPONSE_BYTES)
        try:
            if response.status != 200:
                raise EngineError(f"HTTP {response.status}")
            rest = b""
            for chunk in _read_chunks(response):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.rstrip(b"\r") == b"data: [DONE]":
                        return
                    if line.startswith(b"data: "):
                        yield Reply(200, line.removeprefix(b"data: ")).json()
            if rest.rstrip() != b"data: [DONE]":
                raise EngineError("the stream ended without [DONE]")
        finally:
            connection.close()

    def metrics(self, timeout_s: float = 10) -> Metrics:
        reply = self.get("/metrics", timeout_s, _METRICS_BYTES)
        if reply.status != 200:
            raise EngineError(f"/metrics: HTTP {reply.status}")
        return Metrics.parse(reply.body.decode(errors="replace"))

    def _request(
        self, method: str, path: str, body: object, timeout_s: float, limit_bytes: int
    ) -> Reply:
        deadline = time.monotonic() + timeout_s
        connection, response = self._open(method, path, body, deadline, limit_bytes)
        try:
            return Reply(response.status, b"".join(_read_chunks(response)))
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: object, deadline: float, limit_bytes: int
    ) -> tuple[_Connection, _Response]:
        connection = _Connection(self._path, _remaining_s(deadline))
        text = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            with ExitStack() as on_error:
                on_error.callback(connection.close)
                connection.request(method, path, text, headers)
                response = _Response(connection.sock, limit_bytes, deadline, method)
                response.begin()
                on_error.pop_all()
        except (ConnectionRefusedError, FileNotFoundError) as error:
            # vLLM listens after it has loaded the model.
            raise EngineError("no process is listening on the engine's socket") from error
        except (
            TimeoutError,
            BlockingIOError,
        ) as error:  # the backlog is full
            raise EngineTimeoutError(f"{method} {path}: no response in time") from error
        except (OSError, HTTPException, HostToolError, ValueError) as error:
            raise EngineError(f"{method} {path}: {type(error).__name__}: {error}") from error
        return connection, response


def _remaining_s(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise EngineTimeoutError("no complete response in time")
    return seconds


def _read_chunks(response: _Response) -> Iterator[bytes]:
    try:
        while chunk := response.read1(_CHUNK_BYTES):
            yield chunk
    except TimeoutError as error:
        raise EngineTimeoutError("no complete response in time") from error
    except (OSError, HTTPException, ValueError) as error:
        raise EngineError(f"the response broke off: {type(error).__name__}: {error}") from error
    if response.length:
        raise EngineError(f"the response ended {response.length} bytes early")
