"""How far the layers of a pull are, and whether they still get on: what docker says, counted."""

from __future__ import annotations

import re
import threading
from typing import Any

from spark_contract.work.images import PULL_LEAST_BYTES_PER_S
from spark_contract.work.job import Progress

_EXISTS, _UNPACKING, _ARRIVED = "Already exists", "Extracting", "Download complete"
# A layer of which docker says this needs the registry no more.
_HERE = frozenset({"Verifying Checksum", _ARRIVED, _UNPACKING, "Pull complete", _EXISTS})
# Either store of docker can be silent while it unpacks gigabytes.
_LOCAL_S = 3600.0


class Layers:
    """What was told of each layer; a thread may look while another one takes.

    A sign of life is a status that a layer did not have before, or enough bytes: of a registry
    that sends a byte a minute nobody gets an image.
    """

    def __init__(self, now: float, stall_s: float):
        self._lock = threading.Lock()
        self._stall_s = stall_s
        self._status: dict[str, str] = {}
        self._seen: set[tuple[str, str]] = set()
        # By layer: bytes that came, bytes that were unpacked, and how many there are.
        self._came: dict[str, int] = {}
        self._unpacked: dict[str, int] = {}
        self._totals: dict[str, int] = {}
        self._sign_at, self._sign_bytes = now, 0
        self._phase, self._phase_at = "pull", now

    def take(self, said: dict[str, Any], now: float) -> None:
        """Note one object of docker's answer."""
        name, status = str(said.get("id")), str(said.get("status"))
        with self._lock:
            if "progressDetail" in said:
                self._status[name] = status
                self._count(name, status, said["progressDetail"])
            kind = (name, re.sub(r"\d+", "#", status))  # "Retrying in 5 seconds", "in 4 seconds"
            bytes_now = sum(self._came.values()) + sum(self._unpacked.values())
            least = PULL_LEAST_BYTES_PER_S * self._stall_s if self._outstanding() else 1
            if kind not in self._seen or bytes_now - self._sign_bytes >= least:
                self._sign_at, self._sign_bytes = now, bytes_now
            self._seen.add(kind)

    def _count(self, name: str, status: str, detail: object) -> None:
        told = detail if isinstance(detail, dict) else {}
        current, total = told.get("current"), told.get("total")
        if isinstance(total, int) and total > 0:
            self._totals[name] = total
        counted = self._unpacked if status == _UNPACKING else self._came
        if status == _ARRIVED:
            current = self._totals.get(name)
        # Seconds are no bytes; and a layer that is tried again brings nothing new at first.
        if isinstance(current, int) and not told.get("units"):
            counted[name] = max(current, counted.get(name, 0))

    def _outstanding(self) -> bool:
        return not self._status or any(one not in _HERE for one in self._status.values())

    def stalled(self, now: float) -> str | None:
        """Return what is wrong when nothing goes on any more."""
        with self._lock:
            since_s = now - self._sign_at
            if not self._outstanding():
                what = f"docker has all bytes, and nothing went on for {_LOCAL_S / 60:.0f} minutes"
                return what if since_s > max(_LOCAL_S, self._stall_s) else None
            if since_s <= self._stall_s:
                return None
            waits = [name for name, one in sorted(self._status.items()) if one not in _HERE]
            which = f" of layer {waits[0]}" if waits else ""
            got = f"{sum(self._came.values()) / 1e6:,.1f} MB"
            return f"the pull stalls: nothing{which} came in {since_s:.0f} s, after {got}"

    def progress(self, now: float) -> Progress:
        """Return how far it is; a total is known once each layer has told its own."""
        with self._lock:
            here = not self._outstanding()
            counted, phase = (self._unpacked, "unpack") if here else (self._came, "pull")
            if phase != self._phase:
                self._phase, self._phase_at = phase, now
            wanted = [name for name, one in self._status.items() if one != _EXISTS]
            known = wanted and all(name in self._totals for name in wanted)
            total = sum(self._totals[name] for name in wanted) if known else None
            done = sum(counted.values())
            rate = None if here else round(done / max(now - self._phase_at, 1.0))
            left_s = round((total - done) / rate) if total and rate else None
            return Progress(phase, done if counted else None, total, rate, left_s)
