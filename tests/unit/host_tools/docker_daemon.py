"""A scripted docker daemon on a unix socket."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Answer:
    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler

    def says(self, *objects: dict[str, Any]) -> None:
        for one in objects:
            self.sends(json.dumps(one).encode() + b"\r\n")

    def sends(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self._handler.wfile.flush()

    def repeats(self, *objects: dict[str, Any], every_s: float = 0.05) -> None:
        while True:
            self.says(*objects)
            time.sleep(every_s)


Script = Callable[[Answer, str], object]


class Daemon:
    def __init__(self) -> None:
        self.images: set[str] = set()
        self.pulled: list[str] = []
        self.auth: list[str | None] = []
        self.left = threading.Event()  # the client disconnected
        self.status = 200
        self.script: Script = lambda answer, reference: self.has(answer, reference)

    def has(self, answer: Answer, reference: str) -> None:
        self.images.add(reference)
        answer.says({"status": f"Status: Downloaded newer image for {reference}"})


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: who asked hung up."""


@contextmanager
def listening(path: Path) -> Iterator[Daemon]:
    """Answer at a socket."""
    made = Daemon()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.path.removeprefix("/images/").removesuffix("/json")
            body = b"{}"
            self.send_response(200 if name in made.images else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            asked = {key: one[0] for key, one in parse_qs(urlsplit(self.path).query).items()}
            reference = f"{asked['fromImage']}@{asked['tag']}"
            made.pulled.append(reference)
            made.auth.append(self.headers.get("X-Registry-Auth"))
            self.send_response(made.status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                made.script(Answer(self), reference)
                self.wfile.write(b"0\r\n\r\n")
            except ConnectionAbortedError:  # the script disconnects
                self.close_connection = True
            except OSError:
                made.left.set()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with _Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield made
        server.shutdown()
        thread.join()
