"""Something slow says every few seconds that it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 5.0


@contextmanager
def ticking(
    what: str | Callable[[], str],
    say: Callable[[str], None],
    every_s: float | None = None,
    *,
    first_s: float | None = None,
) -> Iterator[None]:
    """Say ``what`` and how long it has taken, again and again during a block.

    It is said every ``every_s`` seconds, and for the first time after ``first_s``.
    """
    began, over = time.monotonic(), threading.Event()

    def tick() -> None:
        wait_s = first_s or every_s or EVERY_S
        while not over.wait(wait_s):
            text = what if isinstance(what, str) else what()
            say(f"{text}: {time.monotonic() - began:.0f} s")
            wait_s = every_s or EVERY_S

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
