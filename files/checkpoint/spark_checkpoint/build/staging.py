"""New tensor bytes on their way into a result: a staging file, and spans of files.

Everything that replaces or joins the base's tensors is staged first, so that writing a tree
afterwards is one kind of work: copying spans of files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spark_contract.files import named

from spark_checkpoint.format.tree import Span
from spark_checkpoint.storage import file_bytes


class NewTensor(NamedTuple):
    """A tensor of the result that is not the base's: its bytes are a span of some file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    span: Span


@dataclass(slots=True)
class Changes:
    """Everything that will differ from the base.

    ``added`` maps a base name that disappears to the tensors standing in for it; names joining
    without a predecessor are under the empty name.
    """

    added: dict[str, list[NewTensor]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all new tensors."""
        return sum(tensor.span.size_bytes for new in self.added.values() for tensor in new)


class Staging:
    """One growing file that new tensor bytes are appended to."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._end = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

    def append(self, data: bytes | memoryview) -> Span:
        """Write bytes at the end and return where they are."""
        span = self.reserve(memoryview(data).nbytes)
        self.write(span, 0, data)
        return span

    def reserve(self, size_bytes: int) -> Span:
        """Return room to be filled piece by piece."""
        with self._lock:
            span = Span(self._path, self._end, size_bytes)
            self._end += size_bytes
        return span

    def write(self, span: Span, offset: int, data: bytes | memoryview) -> None:
        """Fill part of a reserved span."""
        view = memoryview(data).cast("B")
        position = span.offset + offset
        with named(self._fd):
            while view:
                count = os.pwrite(self._fd, view, position)
                view, position = view[count:], position + count

    def close(self) -> None:
        """Close the file; its spans stay readable by name."""
        os.close(self._fd)


def read_span(span: Span) -> bytes:
    """Return the bytes of a span small enough to hold."""
    return b"".join(map(bytes, file_bytes(*span)))


def pieces_of_span(span: Span, size_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of a span in pieces of a size; the last one may be smaller."""
    for offset in range(0, span.size_bytes, size_bytes):
        piece = min(size_bytes, span.size_bytes - offset)
        yield read_span(Span(span.path, span.offset + offset, piece))
