"""Hashes a part of the served checkpoints every day to find silent damage."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from spark_contract import receipts
from spark_contract.paths import RECEIPT_NAME
from spark_contract.tool import Problem

DAYS = 14  # in which all bytes are hashed
_DAILY_LIMIT_S = 900.0  # per day; on a slow disk, hashing all bytes takes longer than DAYS
_BUFFER_BYTES = 8 << 20


class _Part(NamedTuple):
    tree: Path
    name: str
    offset: int
    size_bytes: int
    sha256: str

    @property
    def key(self) -> str:
        return f"{self.tree / self.name}@{self.offset}"


def hash_next(
    trees: Iterable[Path], position: int, damaged: Collection[str] = ()
) -> tuple[dict[str, Problem], int]:
    """Hash the parts that were ``damaged`` before, then the next 1/14 of the bytes in ``trees``.

    Returns a problem for each damaged part, and the position of the next part.
    """
    parts = [part for tree in dict.fromkeys(trees) for part in _list_parts(tree)]
    hashed = [part for part in parts if part.key in damaged]
    damaged_count = len(hashed)
    remaining_bytes = sum(part.size_bytes for part in parts) / DAYS
    for _ in parts:
        if remaining_bytes <= 0:
            break
        part = parts[position % len(parts)]
        hashed.append(part)
        remaining_bytes -= part.size_bytes
        position = (position + 1) % len(parts)
    deadline_s = time.monotonic() + _DAILY_LIMIT_S
    problems: dict[str, Problem] = {}
    for number, part in enumerate(hashed):
        if number >= damaged_count and time.monotonic() > deadline_s:
            return problems, (position - (len(hashed) - number)) % len(parts)
        if problem := _verify_part(part):
            problems[part.key] = problem
    return problems, position


def _list_parts(tree: Path) -> Iterator[_Part]:
    receipt = receipts.find_receipt(tree)
    for file in receipt.files if receipt else ():
        offset = 0
        lines = file.pieces or ((f"{file.size_bytes}:{file.sha256}",) if file.sha256 else ())
        for line in lines:
            size, _, sha256 = line.partition(":")
            yield _Part(tree, file.path, offset, int(size), sha256)
            offset += int(size)


def _verify_part(part: _Part) -> Problem | None:
    digest, end = hashlib.sha256(), part.offset + part.size_bytes
    try:
        with (part.tree / part.name).open("rb", buffering=0) as content:
            # Read from the disk, not from the page cache, and leave the memory to the engine.
            os.posix_fadvise(content.fileno(), part.offset, part.size_bytes, os.POSIX_FADV_DONTNEED)
            content.seek(part.offset)
            while chunk := content.read(min(_BUFFER_BYTES, end - content.tell())):
                digest.update(chunk)
            os.posix_fadvise(content.fileno(), part.offset, part.size_bytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        return _damage_problem(part, f"cannot be read ({error.strerror})")
    if digest.hexdigest() != part.sha256:
        return _damage_problem(part, f"bytes from {part.offset:,} on differ from the receipt")
    return None


def _damage_problem(part: _Part, message: str) -> Problem:
    receipt = part.tree / RECEIPT_NAME
    file = part.tree / part.name
    # After `touch`, other checkpoints with a hard link to the file hash it again.
    command = f"touch {file}; rm {receipt}"
    fix = f"check the disk (smartctl, journalctl -k), run `{command}`, then deploy again"
    return Problem("checkpoint", f"{file} is damaged: {message}", fix)
