"""A stand-in for the engine that answers every request and records the bytes."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


@dataclass
class Recorder:
    lines: list[str] = field(default_factory=list)
    bodies: list[int] = field(default_factory=list)
    last: bytes = b""
    says: bytes = b"ok"
    hold: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.hold.set()

    def taken(self) -> list[str]:
        """Return the first lines so far, and forget them."""
        found, self.lines = self.lines, []
        return found

    def serve(self, connection: socket.socket) -> None:
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                piece = connection.recv(65536)
                if not piece:
                    return
                data += piece
            head, _, body = data.partition(b"\r\n\r\n")
            sized = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            length = int(sized[1]) if sized else 0
            while len(body) < length:
                piece = connection.recv(65536)
                if not piece:
                    break
                body += piece
            self.lines.append(head.partition(b"\r\n")[0].decode("latin-1"))
            self.bodies.append(len(body))
            self.last = body
            self.hold.wait(20)
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # the client may have disconnected
                connection.sendall(HEAD % len(self.says) + self.says)


@contextmanager
def recording(path: Path) -> Iterator[Recorder]:
    """Listen in the engine's place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    recorder = Recorder()

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=recorder.serve, args=(connection,), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o666)
        listener.listen(512)
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        yield recorder
        recorder.hold.set()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
