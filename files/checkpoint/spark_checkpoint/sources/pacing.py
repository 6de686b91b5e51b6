"""Retries, rate limit and stall timeout of downloads.

A server that sends a byte now and then defeats a read timeout. So the head of a response and each
piece of its body have a time limit, and the body a minimum mean rate.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from spark_contract.fetching import Wire
from urllib3 import BaseHTTPResponse
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
)

from spark_checkpoint.errors import TransferFailed
from spark_checkpoint.progress import note

PIECE_BYTES = 1 << 20
# Of a job's downloads together; no line that anybody downloads a model over is as slow.
_LEAST_BYTES_PER_S = 1024
_PAUSE_LIMIT_S = 30.0


class Again(Exception):  # noqa: N818 - a signal, caught where requests are made
    """The request may work when it is repeated."""

    def __init__(self, reason: str, pause_s: float = 0.0):
        super().__init__(reason)
        self.pause_s = pause_s


def window_s(wire: Wire) -> float:
    """Return over how long a mean rate is taken."""
    return 2 * wire.timeout_s


def least_bytes(wire: Wire, seconds: float) -> float:
    """Return how many bytes of one answer have to come in a time."""
    return _LEAST_BYTES_PER_S * seconds / wire.parallel


class RateLimit:
    """Lets all threads together take at most so many bytes in a second."""

    def __init__(self, bytes_per_s: int | None):
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    @property
    def piece_bytes(self) -> int:
        """Bytes to read at once: small enough that a limit does not come in gulps."""
        if self._bytes_per_s is None:
            return PIECE_BYTES
        return max(4096, min(PIECE_BYTES, self._bytes_per_s // 8))

    def take(self, count_bytes: int) -> None:
        """Wait until ``count_bytes`` more are allowed."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count_bytes / self._bytes_per_s
            pause_s = self._free_at - now
        time.sleep(max(0.0, pause_s))


class Attempt:
    """Counts tries without progress and pauses between them.

    Args:
        url: what is read.
        wire: how patient to be.
        cancelled: set when another part failed for good.
        outage_s: try for at least so long, however many tries that takes.
    """

    def __init__(self, url: str, wire: Wire, cancelled: threading.Event, outage_s: float):
        self._url, self._wire, self._cancelled = url, wire, cancelled
        self._outage_s = outage_s
        self._begin()

    def _begin(self) -> None:
        self._failures, self._progressed_at = 0, time.monotonic()
        self._new_bytes, self._paused_s = 0, 0.0

    def progressed(self, count_bytes: int) -> None:
        """Begin counting anew once as many bytes arrived as the time since then asks for."""
        self._new_bytes += count_bytes
        asked_s = time.monotonic() - self._progressed_at - self._paused_s
        # After an outage no more than a line brings before it breaks again.
        if self._new_bytes >= least_bytes(self._wire, min(asked_s, 10 * window_s(self._wire))):
            self._begin()

    def failed(self, error: Exception) -> None:
        """Pause before the next try, or give up."""
        self._failures += 1
        reason = _reason(error, self._wire.timeout_s)
        waited_s = time.monotonic() - self._progressed_at
        if self._failures >= self._wire.tries and waited_s >= self._outage_s:
            raise TransferFailed(
                self._url,
                f"no progress in {self._failures} tries and {waited_s:.0f} s, last: {reason}",
                "check the network, then run again: it goes on from here",
            ) from error
        pause_s = min(_PAUSE_LIMIT_S, self._wire.backoff_s * 2 ** (self._failures - 1))
        # Spread the retries of parallel requests, which were refused together.
        pause_s *= random.uniform(0.5, 1.0)
        if isinstance(error, Again):
            pause_s = max(pause_s, error.pause_s)
        left_s = max(0.0, self._outage_s - waited_s)
        until = f", for {left_s / 60:.0f} more minutes" if left_s > _PAUSE_LIMIT_S else ""
        note(f"retry: {self._url}: {reason}; again in {pause_s:.1f} s{until}")
        self._paused_s += pause_s
        if self._cancelled.wait(pause_s):
            raise cancelled(self._url) from error


def _reason(error: Exception, timeout_s: float) -> str:
    """Say in plain words why bytes did not come; libraries name their own objects."""
    if isinstance(error, ReadTimeoutError):
        return f"no answer for {timeout_s:g} s"
    if isinstance(error, NewConnectionError | ProtocolError):
        causes = (error.__cause__, error.__context__, *error.args)
        known = (one.strerror for one in causes if isinstance(one, OSError) and one.strerror)
        return next(known, "the connection ended").lower()
    if isinstance(error, ConnectTimeoutError):
        return f"no connection for {timeout_s:g} s"
    return str(error) or type(error).__name__


def cancelled(url: str) -> TransferFailed:
    """Return the error of a read that ends because another one failed."""
    return TransferFailed(url, "was given up because another part failed", "see that message")


_PIECE_S = 1.0  # what came by then is kept, whatever becomes of the connection
_SILENCES = 3  # as many limits on silence may one head or one piece take
_LOOK_S = 0.25
_LEFT_BYTES = 1 << 16  # read for the sake of a connection that can be used again
_sockets: WeakKeyDictionary[BaseHTTPResponse, socket.socket] = WeakKeyDictionary()


class _Prompt(HTTPConnection):
    def getresponse(self) -> Any:
        below = self.sock
        with _watcher.hung_up_after(below, _SILENCES * (self.timeout or 30.0)):
            answer = super().getresponse()
        _sockets[answer] = below
        return answer


class _PromptTls(_Prompt, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Prompt


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _PromptTls


POOLS = {"http": _Pool, "https": _TlsPool}


class _Watcher:
    """One thread for all connections, which hangs up those whose time is over."""

    def __init__(self) -> None:
        self._due: dict[object, tuple[float, socket.socket]] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def hung_up_after(self, below: socket.socket | None, limit_s: float) -> Iterator[None]:
        if below is None:
            yield
            return
        self._wake()
        key = object()
        self._due[key] = time.monotonic() + limit_s, below
        try:
            yield
        finally:
            del self._due[key]

    def _wake(self) -> None:
        with self._starting:
            if self._thread is None or not self._thread.is_alive():  # or left behind by a fork
                self._thread = threading.Thread(target=self._look, daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            for due, below in tuple(self._due.values()):
                if now > due:
                    with suppress(OSError):  # not TLS's own way, which waits for the other side
                        socket.socket.shutdown(below, socket.SHUT_RDWR)


_watcher = _Watcher()


def pieces(response: BaseHTTPResponse, most_bytes: int, wire: Wire) -> Iterator[bytes]:
    """Yield a body in pieces; only time spent waiting for the server counts against it."""
    waited_s, came = 0.0, 0
    while True:
        began = time.monotonic()
        with _watcher.hung_up_after(_sockets.get(response), _SILENCES * wire.timeout_s):
            piece = _piece(response, most_bytes, began)
        if not piece:
            return
        waited_s, came = waited_s + time.monotonic() - began, came + len(piece)
        yield piece
        if waited_s < window_s(wire):
            continue
        if came < least_bytes(wire, waited_s):
            raise Again(f"only {came} bytes came in {waited_s:.0f} s")
        waited_s, came = 0.0, 0


def _piece(response: BaseHTTPResponse, most_bytes: int, began: float) -> bytes:
    parts: list[bytes] = []
    left = most_bytes
    while left and (not parts or time.monotonic() - began < _PIECE_S):
        part = response.read1(left, decode_content=False)
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def put_back(response: BaseHTTPResponse, wire: Wire) -> None:
    """Read what is left of an answer that nobody needs; of a long or slow one no more."""
    left = response.length_remaining
    if left is not None and left <= _LEFT_BYTES:
        with suppress(Again, HTTPError, OSError):
            for _ in pieces(response, _LEFT_BYTES, wire):
                pass
            response.release_conn()
            return
    response.close()
