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

    def send(self, *events: dict[str, Any]) -> None:
        for event in events:
            self.send_bytes(json.dumps(event).encode() + b"\r\n")

    def send_bytes(self, data: bytes) -> None:
        self._handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self._handler.wfile.flush()

    def repeat(self, *events: dict[str, Any]) -> None:
        while True:
            self.send(*events)
            time.sleep(0.05)


Script = Callable[[Answer, str], object]


class Daemon:
    def __init__(self) -> None:
        self.images: set[str] = set()
        self.pulled: list[str] = []
        self.auth: list[str | None] = []
        self.disconnected = threading.Event()
        self.status = 200
        self.script: Script = self.finish

    def finish(self, answer: Answer, reference: str) -> None:
        self.images.add(reference)
        answer.send({"status": f"Status: Downloaded newer image for {reference}"})


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: the client disconnected."""


@contextmanager
def listening(path: Path) -> Iterator[Daemon]:
    daemon = Daemon()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.path.removeprefix("/images/").removesuffix("/json")
            self.send_response(200 if name in daemon.images else 404)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_POST(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            reference = f"{query['fromImage'][0]}@{query['tag'][0]}"
            daemon.pulled.append(reference)
            daemon.auth.append(self.headers.get("X-Registry-Auth"))
            self.send_response(daemon.status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                daemon.script(Answer(self), reference)
                self.wfile.write(b"0\r\n\r\n")
            except ConnectionAbortedError:
                self.close_connection = True
            except OSError:
                daemon.disconnected.set()

        def log_message(self, *_: object) -> None:
            pass

    with _Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield daemon
        server.shutdown()
        thread.join()
