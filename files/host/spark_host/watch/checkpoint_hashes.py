"""Hash a part of the served checkpoints each day, so that silent damage is found."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from spark_contract import receipts
from spark_contract.errors import Problem
from spark_contract.paths import RECEIPT_NAME

DAYS = 14  # for all bytes
_LIMIT_S = 900.0  # on a slow disk a cycle takes longer
_BUFFER_BYTES = 8 << 20


class _Part(NamedTuple):
    tree: Path
    name: str
    offset: int
    size_bytes: int
    sha256: str


def hash_next(trees: Iterable[Path], position: int) -> tuple[tuple[Problem, ...], int]:
    """Hash the next 1/14 of the bytes in ``trees``.

    Returns the problem found, and the position of the next part. A damaged part keeps the position,
    so that each further call reports it until the checkpoint is built anew.
    """
    parts = [part for tree in dict.fromkeys(trees) for part in _parts(tree)]
    left = sum(part.size_bytes for part in parts) / DAYS
    until_s = time.monotonic() + _LIMIT_S
    for _ in parts:
        if left <= 0 or time.monotonic() > until_s:
            break
        position %= len(parts)
        part = parts[position]
        if problem := _problem(part):
            return (problem,), position
        left -= part.size_bytes
        position += 1
    return (), position


def _parts(tree: Path) -> Iterator[_Part]:
    receipt = receipts.find(tree)
    for file in receipt.files if receipt else ():
        offset = 0
        lines = file.pieces or ((f"{file.size_bytes}:{file.sha256}",) if file.sha256 else ())
        for line in lines:
            size, _, sha256 = line.partition(":")
            yield _Part(tree, file.path, offset, int(size), sha256)
            offset += int(size)


def _problem(part: _Part) -> Problem | None:
    digest, end = hashlib.sha256(), part.offset + part.size_bytes
    try:
        with (part.tree / part.name).open("rb", buffering=0) as content:
            # From the disk, not from memory; and the engine's memory must not fill up with it.
            os.posix_fadvise(content.fileno(), part.offset, part.size_bytes, os.POSIX_FADV_DONTNEED)
            content.seek(part.offset)
            while chunk := content.read(min(_BUFFER_BYTES, end - content.tell())):
                digest.update(chunk)
            os.posix_fadvise(content.fileno(), part.offset, part.size_bytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        return _report(part, f"cannot be read ({error.strerror})")
    if digest.hexdigest() != part.sha256:
        return _report(part, f"bytes from {part.offset:,} on differ from the receipt")
    return None


def _report(part: _Part, message: str) -> Problem:
    receipt = part.tree / RECEIPT_NAME
    fix = f"check the disk (smartctl, journalctl -k); rm {receipt}; deploy again to rebuild it"
    return Problem("checkpoint", f"{part.tree / part.name} is damaged: {message}", fix)
