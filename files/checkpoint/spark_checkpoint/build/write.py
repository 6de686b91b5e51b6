"""Write new tensors and rewritten shards; hash and verify the source in the same pass."""

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spark_contract.files import name_file_in_errors, sync, write_all

from spark_checkpoint import ValidationError
from spark_checkpoint.directory import Span, read_span
from spark_checkpoint.headers import DTYPE_BITS, format_header
from spark_checkpoint.progress import Progress
from spark_checkpoint.storage import (
    COPY_BYTES,
    FileHashes,
    PageDropper,
    Piece,
    PieceHasher,
    Stamp,
    read_buffers,
    read_stamp,
)


class NewTensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    span: Span


GRAFTED = ""


@dataclass(slots=True)
class Changes:
    """All differences from the base.

    ``added`` maps replaced names to new tensors, and ``GRAFTED`` to additional tensors.
    """

    added: dict[str, list[NewTensor]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.span.size_bytes for new in self.added.values() for tensor in new)


class Staging:
    """A file for the bytes of new tensors; thread-safe."""

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        self._end = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

    def append(self, data: bytes | memoryview) -> Span:
        span = self.reserve(memoryview(data).nbytes)
        self.write(span, 0, data)
        return span

    def reserve(self, size_bytes: int) -> Span:
        with self._lock:
            span = Span(self._path, self._end, size_bytes)
            self._end += size_bytes
        return span

    def write(self, span: Span, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        position = span.offset + offset
        with name_file_in_errors(self._fd):
            while view:
                count = os.pwrite(self._fd, view, position)
                view, position = view[count:], position + count

    def close(self) -> None:
        os.close(self._fd)


def split_span(span: Span, size_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of a span in chunks of ``size_bytes``; the last may be smaller."""
    for offset in range(0, span.size_bytes, size_bytes):
        chunk_bytes = min(size_bytes, span.size_bytes - offset)
        yield read_span(Span(span.path, span.offset + offset, chunk_bytes))


class VerifiedSource:
    def __init__(self, path: Path, hashes: FileHashes):
        self._path, self._buffer = path, memoryview(bytearray(COPY_BYTES))
        self._pieces = list(reversed(hashes.pieces))
        self._size_bytes = sum(piece.size_bytes for piece in hashes.pieces)
        self._position = self._piece_begin = 0
        self._hasher = hashlib.sha256()
        self._fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._stamp = read_stamp(self._fd)
        self._dropper = PageDropper(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def copy(self, span: Span, sink: "HashingFile", progress: Progress) -> None:
        """Copy a span; spans must be in file order.

        Pieces that are copied as a whole are hashed only once.
        """
        self._skip_to(span.offset)
        end = span.offset + span.size_bytes
        while self._position < end:
            piece = self._pieces[-1]
            piece_end = self._piece_begin + piece.size_bytes
            is_whole_piece = self._position == self._piece_begin and piece_end <= end
            write = sink.write_unhashed if is_whole_piece else sink.write
            for part in self._read_to(min(end, piece_end)):
                write(part)
                progress.add(len(part))
            if is_whole_piece:
                sink.add_piece(piece)

    def finish(self) -> None:
        """Verify the rest of the file."""
        self._skip_to(self._size_bytes)
        self._dropper.finish()
        if read_stamp(self._fd) != self._stamp or self._stamp.size_bytes != self._size_bytes:
            fix = "run the command again, and do not change the base during the build"
            raise ValidationError(str(self._path), "changed while it was being read", fix)

    def _skip_to(self, offset: int) -> None:
        """Verify the bytes up to ``offset`` without copying them."""
        if offset < self._position:
            raise ValueError(f"{self._path}: {offset} precedes {self._position}")
        while self._position < offset:
            piece_end = self._piece_begin + self._pieces[-1].size_bytes
            for _ in self._read_to(min(offset, piece_end)):
                pass

    def _read_to(self, end: int) -> Iterator[memoryview]:
        """Yield the bytes up to ``end``, which must be inside the current piece."""
        while self._position < end:
            window = self._buffer[: min(end - self._position, len(self._buffer))]
            count = os.readv(self._fd, [window])
            if not count:
                fix = "download the base again"
                raise ValidationError(str(self._path), "was truncated while it was being read", fix)
            part = window[:count]
            self._hasher.update(part)
            self._position += count
            yield part
            self._dropper.advance(count)
        if end < self._piece_begin + self._pieces[-1].size_bytes:
            return
        piece, sha256 = self._pieces.pop(), self._hasher.hexdigest()
        if sha256 != piece.sha256:
            raise ValidationError(
                str(self._path),
                f"has sha256 {sha256} in bytes {self._piece_begin} to {self._position}, "
                f"but the receipt lists {piece.sha256}",
                "delete the source directory and download it again",
            )
        self._piece_begin, self._hasher = self._position, hashlib.sha256()


class Written(NamedTuple):
    stamp: Stamp
    pieces: tuple[Piece, ...]


class HashingFile:
    """A new file whose pieces are hashed while it is written."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._hasher = PieceHasher()
        self._dropper = PageDropper(self._fd)

    def write(self, data: bytes | memoryview) -> None:
        self._hasher.update(data)
        self.write_unhashed(data)

    def write_unhashed(self, data: bytes | memoryview) -> None:
        write_all(self._fd, data)
        self._dropper.advance(len(data))

    def add_piece(self, piece: Piece) -> None:
        self._hasher.add(piece)

    def copy(self, span: Span, progress: Progress) -> None:
        for buffer in read_buffers(*span):
            self.write(buffer)
            progress.add(len(buffer))

    def finish(self) -> Written:
        sync(self._fd)
        self._dropper.finish()
        return Written(read_stamp(self._fd), self._hasher.pieces())

    def close(self) -> None:
        os.close(self._fd)


def write_new(
    path: Path, tensors: Sequence[NewTensor], metadata: dict[str, str], progress: Progress
) -> Written:
    with closing(HashingFile(path)) as sink:
        sink.write(_render_header(tensors, metadata))
        for span in join_spans(tensor.span for tensor in tensors):
            sink.copy(span, progress)
        return sink.finish()


def rewrite_shard(
    path: Path,
    tensors: Sequence[NewTensor],
    metadata: dict[str, str],
    progress: Progress,
    base: Path,
    hashes: FileHashes,
) -> Written:
    """Write a shard, and verify the file ``base`` in the same pass.

    If the spans of ``base`` are not in file order, a second pass verifies the file.
    """
    spans = join_spans(tensor.span for tensor in tensors)
    offsets = [span.offset for span in spans if span.path == base]
    in_order = offsets == sorted(offsets)
    with closing(HashingFile(path)) as sink, closing(VerifiedSource(base, hashes)) as source:
        sink.write(_render_header(tensors, metadata))
        for span in spans:
            if in_order and span.path == base:
                source.copy(span, sink, progress)
            else:
                sink.copy(span, progress)
        source.finish()
        return sink.finish()


def copy_file(path: Path, source: Path, progress: Progress, hashes: FileHashes) -> Written:
    size_bytes = sum(piece.size_bytes for piece in hashes.pieces)
    with closing(HashingFile(path)) as sink, closing(VerifiedSource(source, hashes)) as reader:
        reader.copy(Span(source, 0, size_bytes), sink, progress)
        reader.finish()
        return sink.finish()


def join_spans(spans: Iterable[Span]) -> list[Span]:
    result: list[Span] = []
    for span in spans:
        last = result[-1] if result else None
        if last and (last.path, last.offset + last.size_bytes) == (span.path, span.offset):
            result[-1] = last._replace(size_bytes=last.size_bytes + span.size_bytes)
        else:
            result.append(span)
    return result


def is_aligned(tensors: Sequence[NewTensor]) -> bool:
    position = 0
    for tensor in tensors:
        if position % _item_bytes(tensor.dtype):
            return False
        position += tensor.span.size_bytes
    return True


def sort_by_alignment(tensors: Iterable[NewTensor]) -> list[NewTensor]:
    """Sort tensors with wide elements first, so that all are aligned without padding."""
    return sorted(tensors, key=lambda tensor: (-_item_bytes(tensor.dtype), tensor.name))


def _item_bytes(dtype: str) -> int:
    return max(1, DTYPE_BITS[dtype] // 8)


def _render_header(tensors: Sequence[NewTensor], metadata: dict[str, str]) -> bytes:
    return format_header(((t.name, t.dtype, t.shape) for t in tensors), metadata)
