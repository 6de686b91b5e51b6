"""An engine that answers every request alike and records it."""

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
class RecordingEngine:
    lines: list[str] = field(default_factory=list)
    body_sizes: list[int] = field(default_factory=list)
    last_body: bytes = b""
    answer: bytes = b"ok"
    may_answer: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    def take_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as request:
            head = b""
            while (line := request.readline()) not in (b"\r\n", b""):
                head += line
            if not head:
                return
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            self.lines.append(head.partition(b"\r\n")[0].decode("latin-1"))
            self.last_body = request.read(int(length[1]) if length else 0)
            self.body_sizes.append(len(self.last_body))
            self.may_answer.wait(20)
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(HEAD % len(self.answer) + self.answer)


@contextmanager
def recording(path: Path) -> Iterator[RecordingEngine]:
    path.parent.mkdir(parents=True, exist_ok=True)
    engine = RecordingEngine()

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                threading.Thread(target=engine.serve, args=(connection,), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o666)
        listener.listen(512)
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        yield engine
        engine.may_answer.set()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
