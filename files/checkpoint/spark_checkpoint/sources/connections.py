"""urllib3 connections with proxies, stall timeouts, retries and a rate limit.

A server that sends single bytes defeats read timeouts, so response heads and pieces of a body have
a time limit, and bodies a minimum rate, which is high if another source can replace the server.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from spark_contract.fetching import TransferOptions
from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager
from urllib3.connection import HTTPConnection, HTTPSConnection, port_by_scheme
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
)
from urllib3.util import make_headers, parse_url

from spark_checkpoint.errors import TransferError
from spark_checkpoint.progress import note

PIECE_BYTES = 1 << 20
SKIP_S = 300.0  # until a slow source is tried again
# Of all downloads of a job together.
_MINIMUM_BYTES_PER_S = 1024
_PAUSE_LIMIT_S = 30.0
_PIECE_S = 1.0  # after this time return the received bytes
_STALL_TIMEOUTS = 3  # time limit of a response head or piece, in read timeouts
_POLL_S = 0.25
_DRAIN_BYTES = 1 << 16  # discard up to this size to reuse a connection


class RetryableError(Exception):
    def __init__(self, reason: str, pause_s: float = 0.0):
        super().__init__(reason)
        self.pause_s = pause_s


class SlowSourceError(TransferError):
    """A source was too slow for so long that another one must be used for a while."""


class MinimumRate(NamedTuple):
    """The minimum mean rate of a response, measured over windows after a grace period."""

    bytes_per_s: float
    window_s: float
    grace_s: float = 0.0
    # Give up after so long without this rate, whatever number of tries is left.
    patience_s: float = float("inf")

    @staticmethod
    def for_source(transfer: TransferOptions, *, replaceable: bool) -> MinimumRate:
        """Return the floor of a source; ``replaceable``: another source has the same files."""
        if not replaceable:
            return MinimumRate(_MINIMUM_BYTES_PER_S / transfer.parallel, 2 * transfer.timeout_s)
        slow_s = transfer.slow_after_s
        return MinimumRate(
            transfer.min_bytes_per_s / transfer.parallel, slow_s, slow_s / 2, 3 * slow_s
        )


class RateLimit:
    def __init__(self, bytes_per_s: int | None):
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    @property
    def piece_bytes(self) -> int:
        """Bytes per read, small for an even rate."""
        if self._bytes_per_s is None:
            return PIECE_BYTES
        return max(4096, min(PIECE_BYTES, self._bytes_per_s // 8))

    def take(self, count_bytes: int) -> None:
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count_bytes / self._bytes_per_s
            pause_s = self._free_at - now
        time.sleep(max(0.0, pause_s))


class RetryBudget:
    """Limits tries without progress and pauses between them.

    Args:
        cancelled: set when another download failed.
        outage_s: minimum time to retry, regardless of the number of tries.
    """

    def __init__(
        self,
        url: str,
        transfer: TransferOptions,
        cancelled: threading.Event,
        outage_s: float,
        floor: MinimumRate,
    ):
        self._url, self._transfer, self._cancelled = url, transfer, cancelled
        self._outage_s, self._floor = outage_s, floor
        self._reset()

    def _reset(self) -> None:
        self._failures, self._progressed_at = 0, time.monotonic()
        self._new_bytes, self._paused_s = 0, 0.0

    def progressed(self, count_bytes: int) -> None:
        """Reset the count once the mean rate since the last reset is high enough."""
        self._new_bytes += count_bytes
        active_s = time.monotonic() - self._progressed_at - self._paused_s
        # Limited, because a flaky line may deliver little before it breaks again.
        active_s = min(active_s, 10 * self._floor.window_s)
        if self._new_bytes >= self._floor.bytes_per_s * active_s:
            self._reset()

    def failed(self, error: Exception) -> None:
        """Pause before the next try, or raise ``TransferError``."""
        self._failures += 1
        reason = _describe_failure(error, self._transfer.timeout_s)
        waited_s = time.monotonic() - self._progressed_at
        requested_s = error.pause_s if isinstance(error, RetryableError) else 0.0
        is_too_long = waited_s + requested_s >= self._floor.patience_s
        if is_too_long or (self._failures >= self._transfer.tries and waited_s >= self._outage_s):
            is_replaceable = self._floor.patience_s < float("inf")
            is_slow = is_replaceable and (is_too_long or waited_s >= self._floor.window_s)
            raise (SlowSourceError if is_slow else TransferError)(
                self._url,
                f"no progress in {self._failures} tries and {waited_s:.0f} s, last: {reason}",
                "check the network, then run again: it resumes here",
            ) from error
        pause_s = min(_PAUSE_LIMIT_S, self._transfer.backoff_s * 2 ** (self._failures - 1))
        # Spread the retries of parallel requests that failed together.
        pause_s *= random.uniform(0.5, 1.0)
        pause_s = max(pause_s, requested_s)
        left_s = max(0.0, self._outage_s - waited_s)
        until = f", for {left_s / 60:.0f} more minutes" if left_s > _PAUSE_LIMIT_S else ""
        note(f"retry: {self._url}: {reason}; again in {pause_s:.1f} s{until}")
        self._paused_s += pause_s
        if self._cancelled.wait(pause_s):
            raise cancellation_error(self._url) from error


def _describe_failure(error: Exception, timeout_s: float) -> str:
    """Return a readable reason; urllib3 prints Python objects."""
    if isinstance(error, ReadTimeoutError):
        return f"no answer for {timeout_s:g} s"
    if isinstance(error, NewConnectionError | ProtocolError):
        causes = (error.__cause__, error.__context__, *error.args)
        reasons = (c.strerror for c in causes if isinstance(c, OSError) and c.strerror)
        return next(reasons, "the connection ended").lower()
    if isinstance(error, ConnectTimeoutError):
        return f"no connection for {timeout_s:g} s"
    return str(error) or type(error).__name__


def cancellation_error(url: str) -> TransferError:
    return TransferError(url, "cancelled because another download failed", "read its error")


_sockets: WeakKeyDictionary[BaseHTTPResponse, socket.socket] = WeakKeyDictionary()


class _TimedConnection(HTTPConnection):
    def getresponse(self) -> Any:
        sock = self.sock
        with _stall_guard.shut_down_after(sock, _STALL_TIMEOUTS * (self.timeout or 30.0)):
            response = super().getresponse()
        _sockets[response] = sock
        return response


class _TimedTlsConnection(_TimedConnection, HTTPSConnection):
    pass


class _TimedPool(HTTPConnectionPool):
    ConnectionCls = _TimedConnection


class _TimedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _TimedTlsConnection


class _StallGuard:
    """A thread that shuts down sockets after a time limit."""

    def __init__(self) -> None:
        self._due: dict[object, tuple[float, socket.socket]] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def shut_down_after(self, sock: socket.socket | None, limit_s: float) -> Iterator[None]:
        if sock is None:
            yield
            return
        with self._starting:
            # The thread does not survive a fork.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        key = object()
        self._due[key] = time.monotonic() + limit_s, sock
        try:
            yield
        finally:
            del self._due[key]

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_S)
            now = time.monotonic()
            for due, sock in tuple(self._due.values()):
                if now > due:
                    # Bypass TLS: that shutdown waits for the peer.
                    with suppress(OSError):
                        socket.socket.shutdown(sock, socket.SHUT_RDWR)


_stall_guard = _StallGuard()


def read_body(
    response: BaseHTTPResponse,
    piece_bytes: int,
    transfer: TransferOptions,
    floor: MinimumRate | None = None,
) -> Iterator[bytes]:
    """Yield a body in pieces; refuse a slow server."""
    floor = floor or MinimumRate.for_source(transfer, replaceable=False)
    waited_s, received = -floor.grace_s, 0
    while True:
        started = time.monotonic()
        with _stall_guard.shut_down_after(
            _sockets.get(response), _STALL_TIMEOUTS * transfer.timeout_s
        ):
            piece = _read_piece(response, piece_bytes, started)
        if not piece:
            return
        waited_s, received = waited_s + time.monotonic() - started, received + len(piece)
        yield piece
        if waited_s < floor.window_s:
            continue
        if received < floor.bytes_per_s * waited_s:
            raise RetryableError(f"only {received} bytes arrived in {waited_s:.0f} s")
        waited_s, received = 0.0, 0


def _read_piece(response: BaseHTTPResponse, limit_bytes: int, started: float) -> bytes:
    parts: list[bytes] = []
    remaining_bytes = limit_bytes
    while remaining_bytes and (not parts or time.monotonic() - started < _PIECE_S):
        part = response.read1(remaining_bytes, decode_content=False)
        if not part:
            break
        parts.append(part)
        remaining_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def release_connection(response: BaseHTTPResponse, transfer: TransferOptions) -> None:
    """Drain a short body to reuse the connection, otherwise close it."""
    remaining_bytes = response.length_remaining
    if remaining_bytes is not None and remaining_bytes <= _DRAIN_BYTES:
        with suppress(RetryableError, HTTPError, OSError):
            for _ in read_body(
                response, _DRAIN_BYTES, transfer, MinimumRate.for_source(transfer, replaceable=True)
            ):
                pass
            response.release_conn()
            return
    response.close()


def parse_origin(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port, the scope of a token; ``ValueError`` unless http(s)."""
    parts = parse_url(url)
    if parts.scheme not in port_by_scheme or not parts.host:
        raise ValueError(f"{url!r} is not an http(s) address")
    return parts.scheme, parts.host, parts.port or port_by_scheme[parts.scheme]


@cache
def tls_context() -> ssl.SSLContext:
    """Return the system's trusted certificates; reading them takes 0.1 s."""
    return ssl.create_default_context()


class Pools:
    def __init__(self, transfer: TransferOptions, *, direct: bool):
        options: Mapping[str, Any] = {
            "maxsize": transfer.parallel,
            "timeout": transfer.timeout_s,
            "ssl_context": tls_context(),
        }
        self._direct = PoolManager(**options)
        self._by_scheme: dict[str, PoolManager] = {}
        for scheme, address in ({} if direct else urllib.request.getproxies()).items():
            if scheme in port_by_scheme:
                proxy = address if "://" in address else f"http://{address}"
                login = parse_url(proxy).auth
                headers = make_headers(proxy_basic_auth=unquote(login)) if login else {}
                self._by_scheme[scheme] = ProxyManager(proxy, proxy_headers=headers, **options)
        for pool in (self._direct, *self._by_scheme.values()):
            pool.pool_classes_by_scheme = {"http": _TimedPool, "https": _TimedTlsPool}

    def select(self, origin: tuple[str, str, int]) -> PoolManager:
        scheme, host, _ = origin
        if urllib.request.proxy_bypass(host):
            return self._direct
        return self._by_scheme.get(scheme, self._direct)
