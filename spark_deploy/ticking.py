"""Notes with the elapsed time while slow work runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 5.0


@contextmanager
def ticking(
    text: str | Callable[[], str],
    note: Callable[[str], None],
    every_s: float | None = None,
    *,
    first_s: float | None = None,
) -> Iterator[None]:
    """Print ``text`` with the elapsed time every ``every_s``, first after ``first_s`` seconds."""
    started, done = time.monotonic(), threading.Event()

    def tick() -> None:
        wait_s = first_s or every_s or EVERY_S
        while not done.wait(wait_s):
            current = text if isinstance(text, str) else text()
            note(f"{current}: {time.monotonic() - started:.0f} s")
            wait_s = every_s or EVERY_S

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
