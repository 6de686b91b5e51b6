"""A way to the lab's servers that misbehaves towards one guest: everything else passes through.

One listener for each server (hub, its second host, registry, packages). What a guest is done to is
looked up by its address, so guests of one sweep do not disturb each other, and nobody else does.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "10.77.0.1"
# Where the lab's servers are, and where this stands for them.
WAYS = {8082: 18082, 8083: 18083, 5000: 15000, 8081: 18081}
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Fault:
    """What happens to requests for paths that match."""

    kind: str
    match: str = ".*"


class Ways:
    """All listeners, and what each guest is done to, by address."""

    def __init__(self) -> None:
        self.faults: dict[str, Fault] = {}
        self.asked: dict[str, list[str]] = {}
        self._servers = [self._listen(real, here) for real, here in WAYS.items()]

    def _listen(self, real: int, here: int) -> ThreadingHTTPServer:
        handler = type("Way", (_Way,), {"real": real, "ways": self})
        server = _Server((HOST, here), handler)
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        return server

    def close(self) -> None:
        """Stop listening."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @contextmanager
    def broken(self, address: str, fault: Fault) -> Iterator[None]:
        """Misbehave towards one guest for a while."""
        self.asked[address] = []
        self.faults[address] = fault
        try:
            yield
        finally:
            del self.faults[address]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients are cut off on purpose."""


class _Way(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    real = 0
    ways: Ways

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        fault = self.ways.faults.get(self.client_address[0])
        kind = fault.kind if fault and re.search(fault.match, self.path) else ""
        if fault and kind:
            self.ways.asked[self.client_address[0]].append(self.path)
        if kind.isdigit():
            self._says(int(kind), b"no")
        elif kind == "redirect loop":
            self._says(302, b"", Location=f"http://{HOST}:{WAYS[self.real]}{self.path}")
        elif kind == "login page":
            self._says(200, b"<html>please log in</html>", **{"Content-Type": "text/html"})
        elif kind == "no answer":
            time.sleep(400)
        elif kind == "reset before":
            self._reset()
        else:
            self._pass_on(kind)

    do_HEAD = do_POST = do_GET  # noqa: N815 - names of the library

    def _says(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _pass_on(self, kind: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        real = http.client.HTTPConnection(HOST, self.real, timeout=120)
        given = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        real.request(self.command, self.path, body or None, {**given, "Host": self._host()})
        answer = real.getresponse()
        size = answer.getheader("Content-Length")
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, self._mine(value) if name == "Location" else value)
        if size is None and self.command != "HEAD":
            data = answer.read()
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        else:
            self.send_header("Content-Length", size or "0")
            self.end_headers()
            if self.command != "HEAD":
                self._stream(answer, int(size or 0), kind)
        real.close()

    def _stream(self, answer: http.client.HTTPResponse, size: int, kind: str) -> None:
        sent, half = 0, size // 2
        while data := answer.read(min(_BLOCK_BYTES, max(1, half - sent) if sent < half else size)):
            if kind == "wrong bytes" and sent <= half < sent + len(data):
                at = half - sent
                data = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
            if kind in ("truncated", "reset", "stall") and sent >= half:
                if kind == "stall":
                    time.sleep(400)
                return self._reset() if kind == "reset" else self._close()
            self.wfile.write(data)
            sent += len(data)
        return None

    def _close(self) -> None:
        self.close_connection = True

    def _host(self) -> str:
        return str(self.headers.get("Host", "")).replace(str(WAYS[self.real]), str(self.real))

    @staticmethod
    def _mine(address: str) -> str:
        for real, here in WAYS.items():
            address = address.replace(f"{HOST}:{real}/", f"{HOST}:{here}/")
        return address
