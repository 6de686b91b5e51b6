import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(512)
        yield listener


@contextmanager
def accepting(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with listening(path) as listener:
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


@contextmanager
def serving(path: Path, handler: type[BaseHTTPRequestHandler]) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with ThreadingUnixStreamServer(str(path), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield
        server.shutdown()
        thread.join()


class SilentHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def json_server(path: Path, answer: Callable[[str, Any], Any]) -> Iterator[None]:
    class Handler(SilentHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            data = json.dumps(answer(self.path, body)).encode()
            with suppress(BrokenPipeError):
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST  # noqa: N815

    with serving(path, Handler):
        yield


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


@contextmanager
def docker_daemon(path: Path) -> Iterator[Daemon]:
    daemon = Daemon()

    class Handler(SilentHandler):
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

    with serving(path, Handler):
        yield daemon
