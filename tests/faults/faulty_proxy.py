"""A proxy to the lab's servers that injects a fault into the requests of a client address."""

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
PORTS = {8082: 18082, 8083: 18083, 5000: 15000, 8081: 18081}
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Fault:
    kind: str
    match: str = ".*"


class FaultyProxy:
    def __init__(self) -> None:
        self.faults: dict[str, Fault] = {}
        self.paths: dict[str, list[str]] = {}
        self._servers = [self._listen(real, proxy) for real, proxy in PORTS.items()]

    def _listen(self, real: int, port: int) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"real": real, "proxy": self})
        server = _Server((HOST, port), handler)
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        return server

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @contextmanager
    def inject(self, address: str, fault: Fault) -> Iterator[None]:
        self.paths[address] = []
        self.faults[address] = fault
        try:
            yield
        finally:
            del self.faults[address]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay silent: clients are disconnected on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    real = 0
    proxy: FaultyProxy

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        fault = self.proxy.faults.get(self.client_address[0])
        kind = fault.kind if fault and re.search(fault.match, self.path) else ""
        if kind:
            self.proxy.paths[self.client_address[0]].append(self.path)
        if kind.isdigit():
            self._send(int(kind), b"no")
        elif kind == "redirect loop":
            self._send(302, b"", Location=f"http://{HOST}:{PORTS[self.real]}{self.path}")
        elif kind == "login page":
            self._send(200, b"<html>please log in</html>", **{"Content-Type": "text/html"})
        elif kind == "no answer":
            time.sleep(400)
        elif kind == "reset before":
            self._reset()
        else:
            self._forward(kind)

    do_HEAD = do_POST = do_GET  # noqa: N815 - names of the library

    def _send(self, status: int, body: bytes, **headers: str) -> None:
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

    def _forward(self, kind: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        real = http.client.HTTPConnection(HOST, self.real, timeout=120)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        host = str(self.headers.get("Host", "")).replace(str(PORTS[self.real]), str(self.real))
        real.request(self.command, self.path, body or None, {**headers, "Host": host})
        answer = real.getresponse()
        size = answer.getheader("Content-Length")
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, _through_proxy(value) if name == "Location" else value)
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
                if kind == "reset":
                    return self._reset()
                if kind == "stall":
                    time.sleep(400)
                self.close_connection = True
                return None
            self.wfile.write(data)
            sent += len(data)
        return None


def _through_proxy(url: str) -> str:
    for real, proxy in PORTS.items():
        url = url.replace(f"{HOST}:{real}/", f"{HOST}:{proxy}/")
    return url
