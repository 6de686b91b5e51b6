import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any


@contextmanager
def json_server(path: Path, answer: Callable[[str, Any], Any]) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            data = json.dumps(answer(self.path, body)).encode()
            with suppress(BrokenPipeError):
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    path.parent.mkdir(parents=True, exist_ok=True)
    with ThreadingUnixStreamServer(str(path), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield
        server.shutdown()
        thread.join()
