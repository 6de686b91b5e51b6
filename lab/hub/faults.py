"""Switches that make the hub misbehave; the file is read again for every request."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

MODES = ("status", "wrong-hash", "truncate", "slow", "stall", "expire", "no-range")


@dataclass(frozen=True, slots=True)
class HubFault:
    """One way to misbehave.

    ``value`` is an HTTP status (status) or bytes per second (slow); ``match`` a shell pattern of
    file paths; ``times`` how many answers are bad before the hub is well again (0: all of them).
    """

    mode: str
    match: str = "*"
    value: int = 0
    times: int = 0


class FaultSwitch:
    """Reads the switch file and counts down ``times``."""

    def __init__(self, path: Path):
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._used = 0
        self._lock = threading.Lock()

    def current(self, mode: str, path: str) -> HubFault | None:
        """Return the fault when it is of ``mode`` and hits ``path``; counts as one bad answer."""
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
    """Switch the fault on, or off with ``None``; one rename, so no request sees half of it."""
    if fault is None:
        path.unlink(missing_ok=True)
        return
    fields = {"mode": fault.mode, "match": fault.match, "value": fault.value, "times": fault.times}
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(fields))
    fresh.rename(path)
