"""urllib3 connections with proxies, tokens, stall timeouts, retries and a rate limit.

A read timeout cannot detect a server that sends single bytes. Therefore response headers and body
chunks have a time limit, and bodies have a minimum rate, which is higher if other sources have the
file.
"""

import json
import random
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlencode
from weakref import WeakKeyDictionary

from spark_contract.fetching import TransferOptions, parse_challenge
from spark_contract.tool import HostToolError
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

from spark_checkpoint import InputError, TransferError
from spark_checkpoint.progress import note

CHUNK_BYTES = 1 << 20
SKIP_S = 300.0  # time until a slow source is tried again
# All downloads of a job share this minimum.
_MINIMUM_BYTES_PER_S = 1024
_PAUSE_LIMIT_S = 30.0
_CHUNK_TIMEOUT_S = 1.0  # after this time, return an incomplete chunk
_STALL_TIMEOUTS = 3  # response headers and chunks may take this many read timeouts
_POLL_S = 0.25
_DRAIN_BYTES = 1 << 16  # discard up to this size to reuse a connection


class RetryableError(Exception):
    def __init__(self, reason: str, pause_s: float = 0.0):
        super().__init__(reason)
        self.pause_s = pause_s


class SlowSourceError(TransferError):
    """A source is so slow that the next source must be used for a while."""


class MinimumRate(NamedTuple):
    """The minimum mean rate of a response in each window, after a grace period."""

    bytes_per_s: float
    window_s: float
    grace_s: float = 0.0
    # Give up if the rate was too low for this time, even if tries remain.
    patience_s: float = float("inf")

    @staticmethod
    def for_source(transfer: TransferOptions, *, replaceable: bool) -> "MinimumRate":
        """Return the rate for a source, which is ``replaceable`` if another has the same files."""
        if not replaceable:
            return MinimumRate(_MINIMUM_BYTES_PER_S / transfer.parallel, 2 * transfer.timeout_s)
        window_s = transfer.slow_after_s
        return MinimumRate(
            transfer.min_bytes_per_s / transfer.parallel,
            window_s,
            grace_s=window_s / 2,
            patience_s=3 * window_s,
        )


class RateLimit:
    def __init__(self, bytes_per_s: int | None):
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    @property
    def chunk_bytes(self) -> int:
        """The size of a read, which is small enough for an even rate."""
        if self._bytes_per_s is None:
            return CHUNK_BYTES
        return max(4096, min(CHUNK_BYTES, self._bytes_per_s // 8))

    def take(self, count_bytes: int) -> None:
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count_bytes / self._bytes_per_s
            pause_s = self._free_at - now
        time.sleep(max(0.0, pause_s))


class RetryBudget:
    """Limits the number of tries without progress, and waits between tries.

    It allows retries for at least ``outage_s``, regardless of the number of tries.
    """

    def __init__(
        self,
        url: str,
        transfer: TransferOptions,
        canceled: threading.Event,
        outage_s: float,
        minimum: MinimumRate,
    ):
        self._url, self._transfer, self._canceled = url, transfer, canceled
        self._outage_s, self._minimum = outage_s, minimum
        self._reset()

    def _reset(self) -> None:
        self._failures, self._progressed_at = 0, time.monotonic()
        self._new_bytes, self._paused_s = 0, 0.0

    def record_progress(self, count_bytes: int) -> None:
        self._new_bytes += count_bytes
        active_s = time.monotonic() - self._progressed_at - self._paused_s
        # Limit the time, because an unstable connection delivers little before the next failure.
        active_s = min(active_s, 10 * self._minimum.window_s)
        if self._new_bytes >= self._minimum.bytes_per_s * active_s:
            self._reset()

    def record_failure(self, error: Exception) -> None:
        self._failures += 1
        reason = _describe_failure(error, self._transfer.timeout_s)
        waited_s = time.monotonic() - self._progressed_at
        requested_s = error.pause_s if isinstance(error, RetryableError) else 0.0
        is_too_long = waited_s + requested_s >= self._minimum.patience_s
        if is_too_long or (self._failures >= self._transfer.tries and waited_s >= self._outage_s):
            is_replaceable = self._minimum.patience_s < float("inf")
            is_slow = is_replaceable and (is_too_long or waited_s >= self._minimum.window_s)
            error_class = SlowSourceError if is_slow else TransferError
            attempts = f"{self._failures} attempts over {waited_s:.0f} s"
            problem = f"no progress in {attempts}; last error: {reason}"
            fix = "check the network, then run the command again to resume"
            raise error_class(self._url, problem, fix) from error
        pause_s = min(_PAUSE_LIMIT_S, self._transfer.backoff_s * 2 ** (self._failures - 1))
        # Vary the pause, so that parallel requests do not retry at the same time.
        pause_s *= random.uniform(0.5, 1.0)
        pause_s = max(pause_s, requested_s)
        remaining_s = max(0.0, self._outage_s - waited_s)
        limit = (
            f", giving up in {remaining_s / 60:.0f} minutes" if remaining_s > _PAUSE_LIMIT_S else ""
        )
        note(f"{self._url}: {reason}; trying again in {pause_s:.1f} s{limit}")
        self._paused_s += pause_s
        if self._canceled.wait(pause_s):
            raise cancellation_error(self._url) from error


def _describe_failure(error: Exception, timeout_s: float) -> str:
    if isinstance(error, ReadTimeoutError):
        return f"no response for {timeout_s:g} s"
    if isinstance(error, NewConnectionError | ProtocolError):
        causes = (error.__cause__, error.__context__, *error.args)
        for cause in causes:
            if isinstance(cause, OSError) and cause.strerror:
                return cause.strerror.lower()
        return "the connection closed"
    if isinstance(error, ConnectTimeoutError):
        return f"no connection for {timeout_s:g} s"
    return str(error) or type(error).__name__


def cancellation_error(url: str) -> TransferError:
    return TransferError(url, "canceled because another download failed", "fix the other error")


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
    """A thread that shuts down sockets when a time limit expires."""

    def __init__(self) -> None:
        self._deadlines: dict[object, tuple[float, socket.socket]] = {}
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def shut_down_after(self, sock: socket.socket | None, limit_s: float) -> Iterator[None]:
        if sock is None:
            yield
            return
        with self._start_lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        key = object()
        self._deadlines[key] = time.monotonic() + limit_s, sock
        try:
            yield
        finally:
            del self._deadlines[key]

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_S)
            now = time.monotonic()
            for deadline, sock in tuple(self._deadlines.values()):
                if now > deadline:
                    # The method of TLS sockets would wait for the peer.
                    with suppress(OSError):
                        socket.socket.shutdown(sock, socket.SHUT_RDWR)


_stall_guard = _StallGuard()


def read_body(
    response: BaseHTTPResponse,
    chunk_bytes: int,
    transfer: TransferOptions,
    minimum: MinimumRate | None = None,
) -> Iterator[bytes]:
    """Yield a body in chunks; raise RetryableError if the server is too slow."""
    minimum = minimum or MinimumRate.for_source(transfer, replaceable=False)
    waited_s, received = -minimum.grace_s, 0
    while True:
        started = time.monotonic()
        with _stall_guard.shut_down_after(
            _sockets.get(response), _STALL_TIMEOUTS * transfer.timeout_s
        ):
            chunk = _read_chunk(response, chunk_bytes, started)
        if not chunk:
            return
        waited_s += time.monotonic() - started
        received += len(chunk)
        yield chunk
        if waited_s < minimum.window_s:
            continue
        if received < minimum.bytes_per_s * waited_s:
            raise RetryableError(f"only {received} bytes arrived in {waited_s:.0f} s")
        waited_s, received = 0.0, 0


def _read_chunk(response: BaseHTTPResponse, limit_bytes: int, started: float) -> bytes:
    parts: list[bytes] = []
    remaining_bytes = limit_bytes
    while remaining_bytes and (not parts or time.monotonic() - started < _CHUNK_TIMEOUT_S):
        part = response.read1(remaining_bytes, decode_content=False)
        if not part:
            break
        parts.append(part)
        remaining_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def release_connection(response: BaseHTTPResponse, transfer: TransferOptions) -> None:
    """Read a short body to the end, so that the connection can be reused; otherwise close it."""
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


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int


def parse_origin(url: str) -> Origin:
    """Return the origin of an http or https address; raise ValueError for others."""
    parts = parse_url(url)
    if parts.scheme not in port_by_scheme or not parts.host:
        raise ValueError(f"invalid address {url!r}, expected http:// or https://")
    return Origin(parts.scheme, parts.host, parts.port or port_by_scheme[parts.scheme])


@cache
def tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


class Pools:
    """Connection pools with the proxies of the environment, unless ``direct``."""

    def __init__(self, transfer: TransferOptions, *, direct: bool):
        options: Mapping[str, Any] = {
            "maxsize": transfer.parallel,
            "timeout": transfer.timeout_s,
            "ssl_context": tls_context(),
        }
        self._direct = PoolManager(**options)
        self._by_scheme: dict[str, PoolManager] = {}
        proxies = {} if direct else urllib.request.getproxies()
        for scheme in proxies.keys() & port_by_scheme.keys():
            address = proxies[scheme]
            proxy = address if "://" in address else f"http://{address}"
            login = parse_url(proxy).auth
            headers = make_headers(proxy_basic_auth=unquote(login)) if login else {}
            self._by_scheme[scheme] = ProxyManager(proxy, proxy_headers=headers, **options)
        for pool in (self._direct, *self._by_scheme.values()):
            pool.pool_classes_by_scheme = {"http": _TimedPool, "https": _TimedTlsPool}

    def select(self, origin: Origin) -> PoolManager:
        if urllib.request.proxy_bypass(origin.host):
            return self._direct
        return self._by_scheme.get(origin.scheme, self._direct)


# More than any token service sends.
_TOKEN_LIMIT_BYTES = 1 << 20


def read_token(file: str | None, *, required: bool) -> str | None:
    # Requests to a hub can be anonymous, but peers require their key.
    if file is None or not (required or Path(file).exists()):
        return None
    try:
        token = Path(file).read_text("utf-8").strip()
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise InputError(file, problem, "correct token_file") from error
    if not _is_token(token):
        raise InputError(
            file, "does not contain a valid token", "write only the token to this file"
        )
    return token


def _is_token(text: str) -> bool:
    return bool(text) and text.isprintable() and " " not in text


def request_token(
    challenge: str, pool: PoolManager, scheme: str, transfer: TransferOptions
) -> str | None:
    """Return an anonymous token from the service that a 401 challenge names, or None.

    If the registry's ``scheme`` is https, the token service must also use https.
    """
    token_service = parse_challenge(challenge, ("https", scheme))
    if token_service is None:
        return None
    service_url, parameters = token_service
    url = f"{service_url}{urlencode(parameters)}"
    body = b""
    try:
        response = pool.request("GET", url, redirect=False, retries=False, preload_content=False)
        if response.status != 200:
            return None
        for chunk in read_body(response, _TOKEN_LIMIT_BYTES, transfer):
            body += chunk
            if len(body) > _TOKEN_LIMIT_BYTES:
                return None
        document = json.loads(body)
    except (HostToolError, ValueError, RetryableError, HTTPError, OSError):
        return None
    document = document if isinstance(document, dict) else {}
    token = document.get("token") or document.get("access_token")
    return token if isinstance(token, str) and _is_token(token) else None
