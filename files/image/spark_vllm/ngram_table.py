"""Reads rows of an n-gram embedding table from a file and verifies each block once.

A file has a header of 4096 bytes and blocks of 4096 bytes, so reading a row takes one disk read.
A block has whole rows, zeros, and the CRC-32 of both, which starts from the block number, so that a
block in the wrong place is also detected. ``spark_checkpoint`` writes the file.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = "spark-ngram-table-1"
BLOCK_BYTES = 4096
_CHECKED_BYTES = BLOCK_BYTES - 4
GROUP = 16
"""Number of adjacent values in a row that share a scale, in format ``e2m1``."""

OPTION, CACHE_OPTION = "ngram_table", "ngram_cache_mib"
_CACHE_MIB = 1024

Ids = NDArray[np.int64]
Rows = NDArray[np.uint8]
Reader = Callable[[int, list[Any], int], int]
"""Read from a descriptor into buffers at an offset, like ``os.preadv``."""


def table_path(directory: str | Path, layer: int) -> Path:
    return Path(directory) / f"ngram-table-{layer}.bin"


@dataclass(frozen=True)
class Header:
    rows: int
    width: int  # numbers in a row
    number_format: str  # "e2m1" with e4m3 scales of groups, or "e4m3"
    scale: float  # of all numbers

    @property
    def row_bytes(self) -> int:
        e4m3 = self.number_format == "e4m3"
        return self.width if e4m3 else self.width // 2 + self.width // GROUP

    @property
    def rows_per_block(self) -> int:
        return _CHECKED_BYTES // self.row_bytes

    @property
    def file_bytes(self) -> int:
        return BLOCK_BYTES * (1 - (-self.rows // self.rows_per_block))


class DamagedTableError(ValueError):
    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}; fix: run `spark_checkpoint verify --full` on the checkpoint; "
            "if the verification fails, build the checkpoint again"
        )


def read_header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            block = file.read(BLOCK_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DamagedTableError(path, f"cannot be read ({error.strerror})") from error
    if len(block) < BLOCK_BYTES or _checksum(block, 0) != block[_CHECKED_BYTES:]:
        raise DamagedTableError(path, "the header is damaged")
    content = json.loads(block[:_CHECKED_BYTES].rstrip(b"\0"))
    if content.pop("format") != FORMAT:
        raise DamagedTableError(path, f"does not have the format {FORMAT}")
    header = Header(**content)
    if size != header.file_bytes:
        raise DamagedTableError(
            path, f"has {size} bytes, but {header.rows} rows need {header.file_bytes}"
        )
    return header


def _checksum(block: bytes | bytearray, number: int) -> bytes:
    """Return the CRC of block ``number`` of the file; the header is block 0."""
    return zlib.crc32(block[:_CHECKED_BYTES], number & 0xFFFFFFFF).to_bytes(4, "little")


class Table:
    """Reads rows; keeps ``cache_bytes`` of them in memory.

    A row that cannot be read or verified raises an error; rows are never replaced with zeros.
    """

    def __init__(self, path: Path, cache_bytes: int, read: Reader = os.preadv) -> None:
        self.path, self.header = path, read_header(path)
        self._read = read
        self._file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        self._memory = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        self._memory.madvise(mmap.MADV_RANDOM)
        count, size = self.header.rows_per_block, self.header.row_bytes
        blocks = self.header.file_bytes // BLOCK_BYTES
        shape, strides = (blocks, count, size), (BLOCK_BYTES, size, 1)
        self._rows = np.ndarray(shape, np.uint8, self._memory, 0, strides)
        self._block = bytearray(BLOCK_BYTES)
        self._slots = max(1, cache_bytes // (self.header.row_bytes + 8))
        self._cached_ids = np.full(self._slots, -1, np.int64)
        self._cached_rows = np.empty((self._slots, self.header.row_bytes), np.uint8)
        self._verified = np.zeros(blocks, np.bool_)
        self.rows_read = self.cache_hits = 0

    def close(self) -> None:
        del self._rows
        self._memory.close()
        os.close(self._file)

    def lookup(self, ids: Ids, out: Rows) -> None:
        """Write the row of each id to ``out``."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.header.rows:
            raise DamagedTableError(
                self.path, f"has {self.header.rows} rows, but row {ids.max()} was requested"
            )
        slots = ids % self._slots
        is_cached = self._cached_ids[slots] == ids
        np.take(self._cached_rows, slots, axis=0, out=out, mode="clip")
        missing = np.flatnonzero(~is_cached)
        self.rows_read += ids.size
        self.cache_hits += ids.size - missing.size
        if missing.size:
            out[missing] = self._read_rows(ids[missing])
            self._cached_rows[slots[missing]] = out[missing]
            self._cached_ids[slots[missing]] = ids[missing]

    def _read_rows(self, ids: Ids) -> Rows:
        """Return the rows of ids; verify each block before the first use."""
        blocks, offsets = np.divmod(ids, self.header.rows_per_block)
        blocks += 1  # block 0 is the header
        numbers = np.unique(blocks)
        unverified = numbers[~self._verified[numbers]].tolist()
        if len(numbers) > 1:  # A single read needs no prefetch.
            for number in numbers.tolist():
                self._prefetch(number)
        for number in unverified:
            self._verify_block(number)
        # Reading past the end of a truncated file would crash the engine.
        if os.fstat(self._file).st_size != self.header.file_bytes:
            raise DamagedTableError(self.path, "was truncated")
        rows: Rows = self._rows[blocks, offsets]
        return rows

    def request(self, ids: Ids) -> None:
        """Have the system read rows ahead; safe to call from another thread during a lookup."""
        for number in np.unique(ids // self.header.rows_per_block + 1).tolist():
            self._prefetch(number)

    def _prefetch(self, number: int) -> None:
        offset = number * BLOCK_BYTES
        os.posix_fadvise(self._file, offset, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)

    def _verify_block(self, number: int) -> None:
        try:
            count = self._read(self._file, [self._block], number * BLOCK_BYTES)
        except OSError as error:
            raise DamagedTableError(
                self.path, f"block {number} cannot be read ({error.strerror})"
            ) from error
        if count != BLOCK_BYTES:
            raise DamagedTableError(self.path, f"block {number} is missing")
        if _checksum(self._block, number) != self._block[_CHECKED_BYTES:]:
            raise DamagedTableError(self.path, f"block {number} is damaged")
        self._verified[number] = True


def compute_next_ids(prompt: Ids, start: int, end: int, *hash_parts: Ids) -> Ids:
    """Return the n-gram ids of the next ``end - start`` prompt tokens, which start at ``end``.

    The engine also restarts n-grams after an end-of-text token, so a few ids differ there.
    """
    multipliers, sizes, offsets = hash_parts
    context = len(multipliers) - 1
    places = np.arange(max(end, context), min(2 * end - start, len(prompt)))
    mixed, ids = prompt[places] * multipliers[0], []
    for shift in range(1, context + 1):
        mixed = mixed ^ prompt[places - shift] * multipliers[shift]
        heads = np.split(np.arange(len(sizes)), context)[shift - 1]
        ids.append(mixed[:, None] % sizes[heads] + offsets[heads])
    return np.concatenate(ids, axis=1)


@dataclass(frozen=True)
class TableOptions:
    directory: Path  # of the checkpoint
    cache_bytes: int


def read_table_options(additional: Any, directory: str | Path) -> TableOptions | None:
    """Return directory and cache size for tables in files, or None if the tables are tensors."""
    spark = additional.get("spark", {}) if isinstance(additional, Mapping) else {}
    choice, cache_mib = spark.get(OPTION), spark.get(CACHE_OPTION, _CACHE_MIB)
    if choice not in (None, "file"):
        raise ValueError(
            f'--additional-config: spark.{OPTION}: {choice!r}, expected "file"; '
            'fix: use "file", or remove the option'
        )
    if not isinstance(cache_mib, int) or cache_mib < 1:
        raise ValueError(
            f"--additional-config: spark.{CACHE_OPTION}: {cache_mib!r}, expected at least 1 MiB; "
            "fix: use an integer of at least 1, or remove the option"
        )
    has_files = any(Path(directory).glob("ngram-table-*.bin"))
    if has_files != (choice == "file"):
        state = "has" if has_files else "lacks"
        raise ValueError(
            f"--additional-config: spark.{OPTION}: {choice!r}, "
            f"but the checkpoint {state} ngram-table files; "
            'fix: use "file" for checkpoints with ngram-table files, and only for those'
        )
    return TableOptions(Path(directory), cache_mib << 20) if choice else None
