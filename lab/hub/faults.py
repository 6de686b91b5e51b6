"""Faults of the hub; the selection file is read for every request."""

import json
import threading
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from io import BufferedIOBase
from pathlib import Path

from lab.hub.store import FileRecord

_BLOCK_BYTES = 1 << 18
_STALL_S = 600


@dataclass(frozen=True, slots=True)
class HubFault:
    mode: str  # status, wrong-hash, truncate, slow, stall, expire or no-range
    match: str = "*"  # shell pattern of file paths
    value: int = 0  # HTTP status (status) or bytes per second (slow)
    times: int = 0  # number of bad answers; 0: all


class FaultSwitch:
    def __init__(self, path: Path):
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._used = 0
        self._lock = threading.Lock()

    def current(self, mode: str, path: str) -> HubFault | None:
        with self._lock:
            fault = self._read()
            if fault is None or fault.mode != mode or not fnmatch(path, fault.match):
                return None
            if fault.times and self._used >= fault.times:
                return None
            self._used += 1
            return fault

    def _read(self) -> HubFault | None:
        try:
            stat = self._path.stat()
            fault = HubFault(**json.loads(self._path.read_text()))
        except FileNotFoundError:
            return None
        if self._seen != (stat.st_mtime_ns, stat.st_ino):
            self._seen, self._used = (stat.st_mtime_ns, stat.st_ino), 0
        return fault


def set_fault(path: Path, fault: HubFault | None) -> None:
    """Rename, because requests read the file at any time."""
    if fault is None:
        path.unlink(missing_ok=True)
        return
    fields = {"mode": fault.mode, "match": fault.match, "value": fault.value, "times": fault.times}
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(fields))
    fresh.rename(path)


def send_body(
    out: BufferedIOBase, record: FileRecord, start: int, end: int, faults: FaultSwitch
) -> bool:
    """Send bytes ``start`` to ``end``; return whether the connection stays open.

    A wrong byte is in the middle of the file, so a resumed download contains it, too.
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
                at = flip_at - position
                block = block[:at] + bytes([block[at] ^ 0xFF]) + block[at + 1 :]
            out.write(block)
            position += len(block)
            if slow:
                time.sleep(len(block) / max(1, slow.value))
    if stalled:
        time.sleep(_STALL_S)
    return not (cut or stalled)
