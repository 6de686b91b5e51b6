"""The process of ``spark-on-request.service``, where requests to stopped services wait.

The gateway forwards requests for a closed service to that service's socket here. When the service
serves, the request goes to the engine. nginx has already checked key, path and size.
"""

import asyncio
import json
import math
import os
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spark_contract.paths import GATEWAY_DIR, Paths
from spark_contract.release import MODELS
from spark_contract.tool import HostToolError

from spark_host.engine import on_request
from spark_host.engine.on_request import FAILURES, Limits, Switch
from spark_host.gateway import gateway
from spark_host.records import boot
from spark_host.system import folders
from spark_host.system.host import Host
from spark_host.system.programs import log

_POLL_INTERVAL_S = 0.2
_RETRY_INTERVAL_S = 1.0  # for a start that has to wait
_ROUND_INTERVAL_S = 5.0  # between reads of settings and metrics
_HEAD_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 16
_MAX_WAITING_BYTES = 256 << 20  # bodies of all waiting requests
_MAX_PARSED_BYTES = 4 << 20  # because parsed JSON takes up to 25 times the size
_MAX_REQUESTS = 1000  # waiting and in-flight requests; each needs two descriptors
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)


@dataclass
class Service:
    name: str
    server: asyncio.Server
    waiting: int = 0
    waiting_since: float = 0.0
    loading_since: float | None = None
    failures: int = 0
    blocked_until: float = 0.0


class UnavailableError(Exception):
    """The service does not serve; the client may retry after ``retry_s``."""

    def __init__(self, text: str, retry_s: float):
        super().__init__(text)
        self.retry_s = max(1, math.ceil(retry_s))

    @property
    def document(self) -> bytes:
        error = {"message": str(self), "type": "service_unavailable", "code": 503}
        return json.dumps({"type": "error", "error": error}).encode()


class OutdatedError(Exception):
    """Other host tools have been installed."""


class Relay:
    def __init__(self, host: Host, limits: Limits = Limits()):  # noqa: B008
        self.switch, self.limits, self.paths = Switch(host, limits), limits, host.paths
        self.services: dict[str, Service] = {}
        self._bytes = self._requests = 0

    async def run(self) -> None:
        """Run until other host tools are installed, which systemd then starts."""
        with suppress(OutdatedError):
            await asyncio.gather(self._run_rounds(), self._start_services())

    async def _run_rounds(self) -> None:
        while True:
            self._end_if_outdated()
            await self._listen()
            for service in list(self.services.values()):
                await self._run_logged(self.switch.record_use, service.name)
                if not service.waiting:
                    await self._run_logged(self.switch.stop_if_idle, service.name)
            await asyncio.sleep(_ROUND_INTERVAL_S)

    def _end_if_outdated(self) -> None:
        """Raise OutdatedError if needed, but never while a request or a start is in progress."""
        is_loading = any(service.loading_since for service in self.services.values())
        current = (self.paths.tools / "current").resolve()
        is_outdated = current.is_dir() and not Path(__file__).resolve().is_relative_to(current)
        if is_outdated and not (self._requests or is_loading):
            raise OutdatedError

    async def _run_logged(self, function: Any, name: str) -> None:
        try:
            await asyncio.to_thread(function, name)
        except FAILURES as error:
            log(f"{name}: {error}")

    async def _listen(self) -> None:
        """Listen for every on-demand service, and for no other service."""
        names = {path.stem for path in self.paths.below(GATEWAY_DIR).glob("*.json")}
        limits = {name: on_request.idle_limit_s(name, self.paths) for name in names}
        on_demand = {name for name, limit_s in limits.items() if limit_s is not None}
        for name in self.services.keys() - on_demand:
            self.services.pop(name).server.close()
        for name in on_demand - self.services.keys():
            path = self.paths.waiting_socket(name)
            try:
                group = gateway.group_id(name, self.paths)
                path.parent.mkdir(mode=0o711, exist_ok=True)
                server = await asyncio.start_unix_server(partial(self._handle, name), path)
                # A umask would also change files that other threads write.
                os.chown(path, 0, group)
                path.chmod(0o660)
            except FAILURES as error:  # of this service only
                log(f"{name}: {error}")
            else:
                self.services[name] = Service(name, server)

    async def _start_services(self) -> None:
        """Start the services that requests wait for, one at a time, by waiting time."""
        while True:
            for service in sorted(self.services.values(), key=lambda other: other.waiting_since):
                closed = not gateway.is_open(service.name, self.paths)
                if service.waiting and closed and time.monotonic() >= service.blocked_until:
                    await self._start(service)
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _start(self, service: Service) -> None:
        service.loading_since = time.monotonic()
        try:
            started = await asyncio.to_thread(
                self.switch.start, service.name, lambda: service.waiting > 0
            )
            if started:
                service.failures = 0
            else:
                await asyncio.sleep(_RETRY_INTERVAL_S)
        except FAILURES as error:
            log(f"{service.name}: {error}")
            pause_s = self.limits.back_off_s * 2**service.failures
            pause_s = min(pause_s, self.limits.longest_back_off_s)
            service.failures += 1
            service.blocked_until = time.monotonic() + pause_s
        finally:
            service.loading_since = None

    async def _handle(self, name: str, reader: StreamReader, writer: StreamWriter) -> None:
        self._requests += 1
        try:
            await self._respond(self.services[name], reader, writer)
        except (OSError, EOFError, KeyError, ValueError, asyncio.TimeoutError) as error:
            # The client or the engine closed the connection, or sent no HTTP.
            log(f"{name}: a request failed: {type(error).__name__} {error}")
        finally:
            self._requests -= 1
            writer.close()

    async def _respond(self, service: Service, reader: StreamReader, writer: StreamWriter) -> None:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_TIMEOUT_S)
        method, target, _ = head.decode("latin-1").split("\r\n")[0].split(" ")
        body, streams = bytearray(), False
        try:
            if method == "GET":
                writer.write(self._list_models(service, target.partition("?")[0]))
                return await writer.drain()
            body = self._reserve_body(int(_header(head, b"content-length") or 0), service)
            await _read_body(body, reader)
            streams = _wants_stream(body)
            # The gateway sends no second request, so a read returns when the client disconnects.
            disconnected = asyncio.ensure_future(reader.read(1))
            if streams:
                writer.write(_STREAM_HEAD)
            await self._wait_until_serving(service, disconnected, writer if streams else None)
            await self._forward(service, head, body, disconnected, writer, streams)
        except (UnavailableError, HostToolError) as error:
            if isinstance(error, HostToolError):
                log(f"{service.name}: {error}")
                error = UnavailableError("the model is not available", 60)
            if streams:
                writer.write(_chunk(b"event: error\ndata: %b\n\n" % error.document) + _chunk(b""))
            else:
                retry = f"Retry-After: {error.retry_s}\r\n"
                writer.write(_response("503 Service Unavailable", error.document, retry))
            await writer.drain()
        finally:
            self._drop_body(body)

    def _reserve_body(self, length: int, service: Service) -> bytearray:
        if self._requests > _MAX_REQUESTS or self._bytes + length > _MAX_WAITING_BYTES:
            text = "too many requests are waiting for a model"
            raise UnavailableError(text, self._retry_s(service))
        self._bytes += length
        return bytearray(length)

    def _drop_body(self, body: bytearray) -> None:
        self._bytes -= len(body)
        body.clear()

    async def _wait_until_serving(
        self, service: Service, disconnected: asyncio.Future[bytes], stream: StreamWriter | None
    ) -> None:
        """Wait until the service serves; send comments to a stream meanwhile."""
        began = commented = time.monotonic()
        limit_s = self.limits.stream_wait_s if stream else self.limits.wait_s
        service.waiting_since = service.waiting_since if service.waiting else began
        service.waiting += 1
        try:
            while not gateway.is_open(service.name, self.paths):
                now = time.monotonic()
                if disconnected.done():
                    raise ConnectionResetError("the client disconnected")
                if boot.is_stopped(service.name, self.switch.host):
                    raise UnavailableError("the model was stopped on purpose", 60)
                if now < service.blocked_until:
                    raise UnavailableError("the model did not start", service.blocked_until - now)
                if now - began > limit_s:
                    raise UnavailableError("the model is still loading", self._retry_s(service))
                if stream and now - commented >= self.limits.comment_s:
                    commented = now
                    stream.write(_chunk(b": waiting for the model\n\n"))
                    await stream.drain()
                await asyncio.sleep(_POLL_INTERVAL_S)
        finally:
            service.waiting -= 1

    async def _forward(
        self, service: Service, head: bytes, body: bytearray, disconnected: asyncio.Future[bytes],
        writer: StreamWriter, streams: bool,
    ) -> None:  # fmt: skip
        """Send the request to the engine and copy the response until the client disconnects."""
        with folders.opened_socket(self.paths.engine_socket(service.name)) as address:
            engine, sender = await asyncio.open_unix_connection(address)
        try:
            sender.write(head[:-2] + b"Connection: close\r\n\r\n")
            for start in range(0, len(body), _CHUNK_BYTES):  # a single write copies the body
                sender.write(body[start : start + _CHUNK_BYTES])
                await sender.drain()
            self._drop_body(body)
            if streams:
                answer = await _until_disconnected(engine.readuntil(b"\r\n\r\n"), disconnected)
                if b" 200 " not in answer[:16] or _header(answer, b"transfer-encoding") is None:
                    data = await _until_disconnected(engine.read(_CHUNK_BYTES), disconnected)
                    text = data[:1000].decode(errors="replace")
                    raise UnavailableError(f"the engine rejected the request: {text}", 1)
            while data := await _until_disconnected(engine.read(_CHUNK_BYTES), disconnected):
                writer.write(data)
                await writer.drain()
        finally:
            sender.close()

    def _retry_s(self, service: Service) -> float:
        loading_s = time.monotonic() - (service.loading_since or time.monotonic())
        return self.switch.expected_s(service.name) - loading_s

    def _list_models(self, service: Service, path: str) -> bytes:
        release, state = self.switch.release(service.name), "stopped"
        if service.waiting or boot.active_release(service.name, self.switch.host):
            state = "loading"
        models = [
            {"id": name, "object": "model", "owned_by": "spark", "state": state}
            for name in (release.names if release else ())
        ]
        if path == MODELS:
            return _response("200 OK", json.dumps({"object": "list", "data": models}).encode())
        for model in models:
            if path.endswith(f"/{model['id']}"):
                return _response("200 OK", json.dumps(model).encode())
        error = {"message": "no such model", "type": "not_found_error", "code": 404}
        body = json.dumps({"type": "error", "error": error}).encode()
        return _response("404 Not Found", body)


async def _read_body(body: bytearray, reader: StreamReader) -> None:
    at = 0
    while at < len(body):
        reading = reader.read(min(_CHUNK_BYTES, len(body) - at))
        data = await asyncio.wait_for(reading, _HEAD_TIMEOUT_S)
        if not data:
            raise EOFError("the client disconnected")
        body[at : at + len(data)] = data
        at += len(data)


async def _until_disconnected(
    work: Coroutine[Any, Any, bytes], disconnected: asyncio.Future[bytes]
) -> bytes:
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        raise ConnectionResetError("the client disconnected")
    return task.result()


def _header(head: bytes, name: bytes) -> str | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip().decode("latin-1")
    return None


def _wants_stream(body: bytearray) -> bool:
    """Return whether the request asks for a stream; assume not if it is too large to parse."""
    if len(body) > _MAX_PARSED_BYTES:
        return False
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return False  # the engine explains the error
    return isinstance(request, dict) and request.get("stream") is True


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _response(status: str, body: bytes, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def run(paths: Paths) -> int:
    with suppress(KeyboardInterrupt):
        asyncio.run(Relay(Host(paths)).run())
    return 0
