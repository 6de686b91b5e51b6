"""A hub on localhost: ranges, redirects to a second origin, injected faults."""

import hashlib
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


class Hub:
    """Serves ``root``; ``fault(handler, path, data)`` returns True if it sent the response."""

    def __init__(self, root: Path):
        self.root = root
        self.requests = []
        self.sent = Counter()
        self.fault = None
        self.redirect_to = None
        self.ignore_ranges = False
        self.headers = {}
        self._server = QuietServer(("127.0.0.1", 0), Handler)
        self._server.hub = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )

    def __enter__(self):
        self.root.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}"


class QuietServer(ThreadingHTTPServer):
    def server_activate(self):
        """Limit the wait for a client that was killed before the server accepts it."""
        super().server_activate()
        self.socket.settimeout(1)

    def handle_error(self, request, client_address):
        """Stay silent: tests kill clients on purpose."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *parts):
        pass

    def do_GET(self):
        hub, address = self.server.hub, urlsplit(self.path)
        path = unquote(address.path)
        hub.requests.append((path, dict(self.headers), parse_qs(address.query)))
        file = hub.root / path.lstrip("/")
        if hub.redirect_to is not None:
            headers = {"Location": hub.redirect_to(self.path), **hub.headers}
            self.answer(302, b"", headers)
        elif not file.is_file():
            self.answer(404, b"not here")
        else:
            data = file.read_bytes()
            if hub.fault is None or not hub.fault(self, path, data):
                self.serve(data)

    def serve(self, data):
        hub = self.server.hub
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not match or hub.ignore_ranges:
            self.answer(200, data, hub.headers)
            return
        first, last = int(match[1]), min(int(match[2]), len(data) - 1)
        if first >= len(data):
            self.answer(416, b"")
            return
        place = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self.answer(206, data[first : last + 1], {**place, **hub.headers})

    def answer(self, status, body, headers=None, announced=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if announced is None else announced))
        self.end_headers()
        self.server.hub.sent[status] += len(body)
        self.wfile.write(body)


def send_head(handler, data):
    """Send only the headers of a response; return its body."""
    first = int((handler.headers.get("Range") or "bytes=0-").partition("=")[2].partition("-")[0])
    place = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
    handler.answer(206 if first else 200, b"", place, announced=len(data) - first)
    return data[first:]


def send_half(handler, data):
    body = send_head(handler, data)
    handler.wfile.write(body[: len(body) // 2])
    handler.wfile.flush()
    handler.close_connection = True


def send_and_crawl(handler, data):
    body = send_head(handler, data)
    at = max(0, len(body) - len(data) * 2 // 3)
    handler.wfile.write(body[:at])
    for begin in range(at, len(body), 70):
        handler.wfile.write(body[begin : begin + 70])
        time.sleep(0.1)


def fetch_order(directory, out, urls, **changes):
    files = [
        {
            "path": str(path.relative_to(directory)),
            "size_bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]
    return {
        "schema_version": 1,
        "digest": "f" * 64,
        "name": "lab/tiny",
        "commit": "c" * 40,
        "out": str(out),
        "files": files,
        "urls": urls,
        "pieces": False,
        "look_in": [],
        "token_file": None,
        "parallel": 2,
        "rate_limit_bytes_per_s": None,
        "tries": 4,
        "backoff_s": 0.01,
        "timeout_s": 5,
        **changes,
    }


REPOSITORY = "lab/tiny/resolve/" + "c" * 40


def contents(directory):
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file() and p.name != "receipt.json"
    }
