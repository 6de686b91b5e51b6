"""Print progress lines from a thread, so that they also appear during a stall."""

import sys
import threading
import time

from spark_contract import job

INTERVAL_S = 2.0


class Progress:
    """Tracks the bytes of consecutive phases; thread-safe."""

    def __init__(self, *, quiet: bool = False, interval_s: float = INTERVAL_S):
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._quiet = quiet
        self._interval_s = interval_s
        self._phase = "start"
        self._done_bytes = self._skipped_bytes = 0
        self._total_bytes: int | None = None
        self._started_at = time.monotonic()
        self._thread = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> "Progress":
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def start_phase(
        self, name: str, total_bytes: int | None = None, *, done_bytes: int = 0
    ) -> None:
        """Start a phase; the rate excludes ``done_bytes`` of earlier runs."""
        with self._lock:
            self._phase, self._total_bytes = name, total_bytes
            self._done_bytes = self._skipped_bytes = done_bytes
            self._started_at = time.monotonic()
        self.print_line()

    def finish(self) -> None:
        with self._lock:
            self._phase, self._total_bytes = "done", self._done_bytes
        self.print_line()

    def add(self, count_bytes: int) -> None:
        """Count transferred bytes; a negative count means bytes to transfer again."""
        with self._lock:
            self._done_bytes += count_bytes

    def skip(self, count_bytes: int) -> None:
        """Count bytes that need no transfer; the rate excludes them."""
        with self._lock:
            self._done_bytes += count_bytes
            self._skipped_bytes += count_bytes

    def print_line(self) -> None:
        if not self._quiet:
            print(self.line(), flush=True)

    def line(self) -> str:
        with self._lock:
            elapsed_s = max(time.monotonic() - self._started_at, 1e-6)
            rate = max(0, self._done_bytes - self._skipped_bytes) / elapsed_s
            total, eta_s = self._total_bytes, None
            if total and rate >= 1:
                eta_s = round((total - self._done_bytes) / rate)
            return job.Progress(self._phase, self._done_bytes, total, round(rate), eta_s).line()

    def _print_lines(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.print_line()


def note(message: str) -> None:
    """Print a message to standard error as a single line; programs read only standard output."""
    print(printable(" ".join(message.split())), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
