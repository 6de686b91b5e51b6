"""Streams spans of files into a new shard: read, hash, write, fsync, with one buffer.

A base shard is read from its first to its last byte even where bytes are dropped, so that its
own hash comes out of the same pass and a damaged or changed base is noticed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from spark_checkpoint.donor import Span
from spark_checkpoint.errors import GateRefused, TransferFailed
from spark_checkpoint.header import DTYPE_BITS, emit_header
from spark_checkpoint.progress import Progress
from spark_checkpoint.staging import NewTensor
from spark_checkpoint.storage import COPY_BYTES, stamp_of, write_all


class Written(NamedTuple):
    """A finished file."""

    size_bytes: int
    sha256: str
    modified_ns: int


class SequentialSource:
    """Reads one file front to back, hashing what is skipped as well as what is used."""

    def __init__(self, path: Path, buffer: memoryview):
        self._path, self._buffer = path, buffer
        self._fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._stamp = stamp_of(self._fd)
        self._hasher = hashlib.sha256()
        self._position = 0

    def copy(self, span: Span, sink: HashingFile, progress: Progress) -> None:
        """Bring the span into ``sink``; spans must come in the order of the file."""
        self._skip_to(span.offset)
        left = span.size_bytes
        while left:
            piece = self._read(left)
            sink.write(piece)
            progress.add(len(piece))
            left -= len(piece)

    def finish(self, expected_sha256: str | None) -> None:
        """Read the rest and refuse a file that is not what its receipt says or that moved."""
        self._skip_to(self._stamp.size_bytes)
        changed = stamp_of(self._fd) != self._stamp
        os.close(self._fd)
        if changed:
            raise GateRefused(
                str(self._path), "was changed while it was read", "leave the base alone, run again"
            )
        found = self._hasher.hexdigest()
        if expected_sha256 is not None and found != expected_sha256:
            raise GateRefused(
                str(self._path),
                f"has sha256 {found}, its receipt says {expected_sha256}",
                "delete the source directory and fetch it again",
            )

    def _skip_to(self, offset: int) -> None:
        if offset < self._position:
            raise ValueError(f"{self._path}: {offset} lies before {self._position}")
        while self._position < offset:
            self._read(offset - self._position)

    def _read(self, limit_bytes: int) -> memoryview:
        count = os.readv(self._fd, [self._buffer[: min(limit_bytes, len(self._buffer))]])
        if not count:
            raise GateRefused(
                str(self._path), "became shorter while it was read", "fetch the base again"
            )
        piece = self._buffer[:count]
        self._hasher.update(piece)
        self._position += count
        return piece


class HashingFile:
    """A file under construction whose hash grows with it."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._hasher = hashlib.sha256()
        self._size_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._hasher.update(data)
        write_all(self._fd, data)
        self._size_bytes += len(data)

    def finish(self) -> Written:
        """Flush to the disk and return what was written."""
        os.fsync(self._fd)
        return Written(self._size_bytes, self._hasher.hexdigest(), stamp_of(self._fd).modified_ns)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def write_shard(
    path: Path,
    tensors: Sequence[NewTensor],
    metadata: dict[str, str],
    progress: Progress,
    base: Path | None = None,
    base_sha256: str | None = None,
) -> Written:
    """Write a shard of ``tensors`` in their order and return its hash.

    Spans of ``base`` must come in file order; that file is then checked against
    ``base_sha256`` in the same pass. Other spans are read from wherever they are.
    """
    header = emit_header(((t.name, t.dtype, t.shape) for t in tensors), metadata)
    buffer = memoryview(bytearray(COPY_BYTES))
    source = SequentialSource(base, buffer) if base is not None else None
    sink = HashingFile(path)
    try:
        sink.write(header)
        for span in joined(tensor.span for tensor in tensors):
            if source is not None and span.path == base:
                source.copy(span, sink, progress)
            else:
                _copy_span(span, sink, buffer, progress)
        if source is not None:
            source.finish(base_sha256)
        return sink.finish()
    finally:
        sink.close()


def copy_file(path: Path, source: Path, progress: Progress, sha256: str | None) -> Written:
    """Copy a file, hashing it on the way, and refuse one that is not what its receipt says."""
    buffer = memoryview(bytearray(COPY_BYTES))
    reader, sink = SequentialSource(source, buffer), HashingFile(path)
    try:
        reader.copy(Span(source, 0, source.stat().st_size), sink, progress)
        reader.finish(sha256)
        return sink.finish()
    finally:
        sink.close()


def joined(spans: Iterable[Span]) -> list[Span]:
    """Join spans that follow each other in one file."""
    result: list[Span] = []
    for span in spans:
        last = result[-1] if result else None
        if (
            last is not None
            and last.path == span.path
            and last.offset + last.size_bytes == span.offset
        ):
            result[-1] = Span(last.path, last.offset, last.size_bytes + span.size_bytes)
        else:
            result.append(span)
    return result


def aligned(tensors: Sequence[NewTensor]) -> bool:
    """Say whether every tensor starts at a multiple of its element size."""
    position = 0
    for tensor in tensors:
        if position % item_bytes(tensor.dtype):
            return False
        position += tensor.span.size_bytes
    return True


def by_alignment(tensors: Iterable[NewTensor]) -> list[NewTensor]:
    """Return tensors with the widest elements first, so that all are aligned without padding."""
    return sorted(tensors, key=lambda tensor: (-item_bytes(tensor.dtype), tensor.name))


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element, at least 1."""
    return max(1, DTYPE_BITS[dtype] // 8)


def _copy_span(span: Span, sink: HashingFile, buffer: memoryview, progress: Progress) -> None:
    position, left = span.offset, span.size_bytes
    with span.path.open("rb", buffering=0) as file:
        while left:
            count = os.preadv(file.fileno(), [buffer[: min(left, len(buffer))]], position)
            if not count:
                raise TransferFailed(str(span.path), "became shorter", "run again")
            sink.write(buffer[:count])
            progress.add(count)
            position, left = position + count, left - count
