"""Something slow says every few seconds that it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 5.0


@contextmanager
def ticking(what: str, say: Callable[[str], None], every_s: float | None = None) -> Iterator[None]:
    """Say ``what`` and how long it has taken, again and again during a block."""
    began, over = time.monotonic(), threading.Event()

    def tick() -> None:
        while not over.wait(every_s or EVERY_S):
            say(f"{what}: {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
