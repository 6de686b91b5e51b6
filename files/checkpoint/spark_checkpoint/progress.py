"""Prints how far a job is, line by line, for a poller.

A thread prints on its own clock, so a stalled disk or network still gives lines.
"""

from __future__ import annotations

import sys
import threading
import time

from spark_contract import job

INTERVAL_S = 2.0


class Progress:
    """Counts bytes of one phase after another; safe to call from several threads."""

    def __init__(self, *, quiet: bool = False, interval_s: float = INTERVAL_S):
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._quiet = quiet
        self._interval_s = interval_s
        self._phase = "start"
        self._done_bytes = self._skipped_bytes = 0
        self._total_bytes: int | None = None
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Progress:
        """Start the printing thread."""
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop printing; the last line of a finished phase stays the last line."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def phase(self, name: str, total_bytes: int | None = None, *, done_bytes: int = 0) -> None:
        """Begin a phase; ``done_bytes`` were there before and do not count for the rate."""
        with self._lock:
            self._phase, self._total_bytes = name, total_bytes
            self._done_bytes = self._skipped_bytes = done_bytes
            self._began = time.monotonic()
        self.show()

    def finish(self) -> None:
        """End the last phase: everything is done."""
        with self._lock:
            self._phase, self._total_bytes = "done", self._done_bytes
        self.show()

    def add(self, count_bytes: int) -> None:
        """Count bytes done now (negative: they have to be done again)."""
        with self._lock:
            self._done_bytes += count_bytes

    def skip(self, count_bytes: int) -> None:
        """Count bytes that were already there, so that the rate stays honest."""
        with self._lock:
            self._done_bytes += count_bytes
            self._skipped_bytes += count_bytes

    def show(self) -> None:
        """Print the line now."""
        if not self._quiet:
            print(self.line(), flush=True)

    def line(self) -> str:
        """Return the current line."""
        with self._lock:
            elapsed_s = max(time.monotonic() - self._began, 1e-6)
            rate = max(0, self._done_bytes - self._skipped_bytes) / elapsed_s
            total = self._total_bytes
            eta_s = round((total - self._done_bytes) / rate) if total and rate >= 1 else None
            return job.Progress(self._phase, self._done_bytes, total, round(rate), eta_s).line()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.show()


def note(message: str) -> None:
    """Tell a person something on standard error; never part of the machine-read lines."""
    print(message, file=sys.stderr, flush=True)
