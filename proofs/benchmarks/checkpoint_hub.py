"""A file server with byte ranges on localhost, fast enough not to be what is measured."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = self.root / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, last = (int(match[1]), min(int(match[2]), size - 1)) if match else (0, size - 1)
            self.send_response(206 if match else 200)
            if match:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(last + 1 - first))
            self.end_headers()
            self.wfile.flush()
            sock: socket.socket = self.connection
            position = first
            while position <= last:
                position += os.sendfile(sock.fileno(), file.fileno(), position, last + 1 - position)


@contextmanager
def serve(root: Path) -> Iterator[str]:
    """Serve a directory for the duration of a block; yields the address."""
    handler = type("Handler", (_Handler,), {"root": root})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
