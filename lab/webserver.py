"""The threaded HTTP/1.1 server below both file servers of the lab."""

from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer


class LabHttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def server_bind(self) -> None:
        """Bind without the parent's reverse name lookup, which may hang without DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


class _Files(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True


def serve_files(directory: Path, host: str, port: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)

    def handler(*words: object) -> _Files:
        return _Files(*words, directory=str(directory))  # type: ignore[arg-type]  # as the server calls it

    LabHttpServer((host, port), handler).serve_forever()
