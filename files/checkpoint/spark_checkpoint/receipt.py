"""Receipts and the piece hashes in them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from spark_contract import documents
from spark_contract.paths import RECEIPT_NAME
from spark_contract.receipts import AnyReceipt, Receipt, ReceiptFile, parse

from spark_checkpoint.errors import TreeDiffers
from spark_checkpoint.storage import Stamp, file_bytes, hash_file, write_json

# Small pieces keep what is hashed twice small, the pieces that a replaced tensor cuts; large
# ones keep receipts short. 72 GB are 17,000 pieces, 1.5 MB of receipt.
PIECE_BYTES = 4 << 20


class Piece(NamedTuple):
    size_bytes: int
    sha256: str

    def __str__(self) -> str:
        """Return the piece as receipts write it."""
        return f"{self.size_bytes}:{self.sha256}"


class Proof(NamedTuple):
    """A file's hash and the hashes of its pieces in order."""

    sha256: str
    pieces: tuple[Piece, ...]


class PieceHasher:
    """Hashes the pieces of a file as its bytes pass."""

    def __init__(self, piece_bytes: int = PIECE_BYTES):
        self._piece_bytes = piece_bytes
        self._hasher = hashlib.sha256()
        self._filled_bytes = 0
        self._pieces: list[Piece] = []

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            part = view[: self._piece_bytes - self._filled_bytes]
            self._hasher.update(part)
            self._filled_bytes += len(part)
            view = view[len(part) :]
            if self._filled_bytes == self._piece_bytes:
                self.cut()

    def cut(self) -> None:
        if self._filled_bytes:
            self._pieces.append(Piece(self._filled_bytes, self._hasher.hexdigest()))
            self._hasher, self._filled_bytes = hashlib.sha256(), 0

    def know(self, piece: Piece) -> None:
        """Add a piece whose hash is known."""
        self.cut()
        self._pieces.append(piece)

    def pieces(self) -> tuple[Piece, ...]:
        self.cut()
        return tuple(self._pieces)


def pieces_of(file: ReceiptFile) -> tuple[Piece, ...] | None:
    """Return a file's pieces from its receipt, or None.

    Raises:
        ValueError: a line is malformed, or the pieces do not cover the file.
    """
    if file.pieces is None:
        return None
    pieces = []
    for line in file.pieces:
        size, _, sha256 = line.partition(":")
        if int(size) <= 0 or len(sha256) != 64:
            raise ValueError(f"{line!r} is no piece of a file")
        pieces.append(Piece(int(size), sha256))
    if sum(piece.size_bytes for piece in pieces) != file.size_bytes:
        raise ValueError(f"the pieces do not add up to {file.size_bytes} bytes")
    return tuple(pieces)


def prove_file(path: Path, on_bytes: Callable[[int], None]) -> Proof:
    whole, pieces = hashlib.sha256(), PieceHasher()
    for part in file_bytes(path):
        whole.update(part)
        pieces.update(part)
        on_bytes(len(part))
    return Proof(whole.hexdigest(), pieces.pieces())


def first_difference(
    path: Path, pieces: Sequence[Piece], on_bytes: Callable[[int], None]
) -> int | None:
    """Return the offset of the first differing piece, or None."""
    begin = 0
    for piece in pieces:
        if hash_file(path, on_bytes, begin, piece.size_bytes) != piece.sha256:
            return begin
        begin += piece.size_bytes
    return None


def load_receipt(directory: Path) -> AnyReceipt | None:
    """Return the receipt of a tree, None when there is none.

    Raises:
        TreeDiffers: the receipt is there but cannot be one of ours.
    """
    path = directory / RECEIPT_NAME
    try:
        receipt = parse(path.read_bytes())
        for file in receipt.files:
            pieces_of(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        fix = "move the directory away and run the deploy again"
        raise TreeDiffers(str(path), f"is no receipt ({error})", fix) from error
    return receipt


def vouched(
    path: str,
    stamp: Stamp,
    sha256: str | None,
    pieces: tuple[str, ...] | None = None,
    link_of: str | None = None,
) -> ReceiptFile:
    """Return a file of a receipt by what was seen of it when it was hashed."""
    size_bytes, modified_ns = stamp.size_bytes, stamp.modified_ns
    return ReceiptFile(path, size_bytes, sha256, modified_ns, pieces, link_of, stamp.inode)


def write_receipt(directory: Path, receipt: Receipt) -> None:
    """Write the receipt in one step; call it last."""
    write_json(directory / RECEIPT_NAME, documents.plain(receipt))
