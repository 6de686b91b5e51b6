"""Hangs up on servers that trickle: a byte now and then keeps every limit on silence waiting.

The head of an answer, and each piece of its body, has to come to an end; and the body a mean rate
that any line has. Nothing limits how long a whole file takes.
"""

from __future__ import annotations

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
from urllib3.exceptions import HTTPError

from spark_checkpoint.sources.pacing import Again, least_bytes, window_s

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
