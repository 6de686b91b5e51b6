"""Sends a file's bytes, well or, when a fault says so, badly."""

from __future__ import annotations

import time
from typing import Protocol

from lab.hub.faults import FaultSwitch
from lab.hub.store import FileRecord

_BLOCK_BYTES = 1 << 18
_STALL_S = 600


class Sink(Protocol):
    """Anything bytes can be written to."""

    def write(self, data: bytes, /) -> object:
        """Write all of ``data``."""


def send_body(out: Sink, record: FileRecord, start: int, end: int, faults: FaultSwitch) -> bool:
    """Send bytes ``start`` to ``end``; return whether the connection may go on.

    A flipped byte sits at the middle of the *file*, so a resumed download meets it as well.
    """
    flip_at = record.size_bytes // 2 if faults.current("wrong-hash", record.path) else None
    slow = faults.current("slow", record.path)
    cut = faults.current("truncate", record.path)
    stalled = faults.current("stall", record.path)
    stop = start + (end - start) // 2 if cut or stalled else end + 1
    block_bytes = min(_BLOCK_BYTES, max(1, slow.value // 10)) if slow else _BLOCK_BYTES
    with record.disk_path.open("rb") as file:
        file.seek(start)
        position = start
        while position < stop:
            block = file.read(min(block_bytes, stop - position))
            if flip_at is not None and position <= flip_at < position + len(block):
                block = _flipped(block, flip_at - position)
            out.write(block)
            position += len(block)
            if slow:
                time.sleep(len(block) / max(1, slow.value))
    if stalled:
        time.sleep(_STALL_S)
    return not (cut or stalled)


def _flipped(block: bytes, at: int) -> bytes:
    return block[:at] + bytes([block[at] ^ 0xFF]) + block[at + 1 :]
