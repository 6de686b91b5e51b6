"""Read byte ranges over HTTP with resume; responses are not trusted.

Hubs redirect to signed, expiring addresses of content hosts; only the hub's origin gets the token.
Redirects are followed here, because the first response describes the file and a signed address is
valid for many ranges.
"""

import copy
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar
from urllib.parse import urljoin

from spark_contract.fetching import FetchFile, TransferOptions
from spark_contract.units import COMMIT
from urllib3 import BaseHTTPResponse, Retry
from urllib3.exceptions import HTTPError

from spark_checkpoint import InputError, TransferError, ValidationError
from spark_checkpoint.progress import note
from spark_checkpoint.sources import connections

_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_EXPIRED_STATUS = frozenset({400, 401, 403, 404, 410})
# ValueError and OverflowError: headers that urllib3 or Python cannot parse.
_FAILURES = (connections.RetryableError, HTTPError, OSError, ValueError, OverflowError)
_COMMIT = re.compile(rf"/resolve/({COMMIT})(?:/|$)")
_DIGITS = "[0-9]{1,20}"
_CONTENT_RANGE = re.compile(rf"bytes ({_DIGITS})-({_DIGITS})/({_DIGITS})")
_REDIRECT_LIMIT = 10
_RETRY_AFTER = Retry(retry_after_max=120)
_OTHER_SOURCE = "use another source"
_GATED_FIX = (
    "accept the terms on the hub's page, run `hf auth login` or set hub.token, "
    "then run the deploy again"
)
_STATUS_FIXES = {
    # The public hub also returns 401 for unknown names.
    401: f"check the name; for a private or gated repository, {_GATED_FIX}",
    403: _GATED_FIX,
    404: "check the repository's name and the revision or commit",
}

T = TypeVar("T")


class RangeUnsupportedError(TransferError):
    """The server ignores ranges and sends whole files."""


class NotFoundError(TransferError):
    """The server returned 404."""


class HttpClient:
    """A thread-safe client for a download.

    Only the origins of ``trusted_urls`` receive the token. ``direct``, for peers, bypasses proxies
    and requires the token. Setting ``stop`` ends all reads.
    """

    def __init__(
        self,
        transfer: TransferOptions,
        trusted_urls: tuple[str, ...],
        *,
        direct: bool = False,
        stop: threading.Event | None = None,
        accept: str = "*/*",
    ):
        self._transfer, self._accept = transfer, accept
        self._direct, self._is_first_pass = direct, False
        self._pools = connections.Pools(transfer, direct=direct)
        self._token = connections.read_token(transfer.token_file, required=direct)
        try:
            self._trusted = frozenset(connections.parse_origin(url) for url in trusted_urls)
        except ValueError as error:
            raise InputError("sources", str(error), "correct the address") from error
        self._limit = connections.RateLimit(transfer.rate_limit_bytes_per_s)
        self._lock = threading.Lock()
        self._locations: dict[str, str] = {}  # after redirects
        # Size and hash that the hub announces; the hash is sha256 or, for small files, git sha1.
        self._announced: dict[str, tuple[int | None, str | None]] = {}
        self.stop = stop or threading.Event()
        self.received_bytes = 0

    def for_first_pass(self) -> "HttpClient":
        """Return a copy, with shared limits, that abandons slow and unreachable sources."""
        client = copy.copy(self)
        client._is_first_pass, client._transfer = True, replace(self._transfer, outage_s=0.0)
        return client

    def cancel(self) -> None:
        self.stop.set()

    def check_announcement(self, url: str, file: FetchFile) -> None:
        """Raise ValidationError if the announced size or hash differs from the lock."""
        size_bytes, announced_hash = self._announced.get(url, (None, None))
        # Compare only hashes of the same type, which the length identifies.
        locked_hash = {64: file.sha256, 40: file.git_sha1}.get(len(announced_hash or ""))
        has_other_hash = locked_hash is not None and announced_hash != locked_hash
        if size_bytes not in (None, file.size_bytes) or has_other_hash:
            problem = (
                f"the hub offers {size_bytes} bytes with hash {announced_hash}, "
                f"but the lock has {file.size_bytes} bytes with hash {file.sha256 or file.git_sha1}"
            )
            raise ValidationError(url, problem, "lock the repository again")

    def read(self, url: str, begin: int, end: int, total_bytes: int | None = None) -> bytes:
        return b"".join(self.stream(url, begin, end, total_bytes))

    def exists(self, url: str) -> bool:
        try:
            self._open(url, (0, 1)).close()
        except (TransferError, *_FAILURES):
            return False
        return True

    def read_start(self, url: str, count_bytes: int) -> tuple[int, bytes]:
        def read_once() -> tuple[int, bytes]:
            with self._open(url, (0, count_bytes)) as response:
                _, _, total = _parse_content_range(url, response)
                length = _check_length(url, response, 0, count_bytes, total, whole=False)
                return total, b"".join(self._read(url, response, length))

        return self._retry(url, read_once)

    def read_whole(self, url: str, limit_bytes: int) -> bytes:
        def read_once() -> bytes:
            body = bytearray()
            with self._open(url, None) as response:
                for chunk in self._read_chunks(url, response):
                    self._count_received(len(chunk))
                    body += chunk
                    if len(body) > limit_bytes:
                        problem = f"exceeds {limit_bytes} bytes"
                        raise ValidationError(url, problem, "check the repository")
                missing = response.length_remaining
            if missing:
                raise connections.RetryableError(f"the connection closed {missing} bytes early")
            return bytes(body)

        return self._retry(url, read_once)

    def stream(
        self, url: str, begin: int, end: int, total_bytes: int | None = None
    ) -> Iterator[bytes]:
        """Yield the bytes ``[begin, end)`` of a file in order; resume after interruptions.

        Raise RangeUnsupportedError if the server sends the whole file instead of the range, and
        TransferError if all retries fail without progress.
        """
        position = begin
        budget = self._new_budget(url)
        while position < end:
            whole = position == 0 and total_bytes is not None and end == total_bytes
            try:
                with self._open(url, None if whole else (position, end)) as response:
                    length = _check_length(url, response, position, end, total_bytes, whole=whole)
                    for chunk in self._read(url, response, length):
                        position += len(chunk)
                        budget.record_progress(len(chunk))
                        yield chunk
                return
            except _FAILURES as error:
                budget.record_failure(error)

    def _retry(self, url: str, request: Callable[[], T]) -> T:
        budget = self._new_budget(url)
        while True:
            try:
                return request()
            except _FAILURES as error:
                budget.record_failure(error)

    def _new_budget(self, url: str) -> connections.RetryBudget:
        outage_s = self._transfer.outage_s if self._is_trusted(url) else 0.0
        return connections.RetryBudget(
            url, self._transfer, self.stop, outage_s, self._minimum_rate(url)
        )

    def _is_trusted(self, url: str) -> bool:
        return connections.parse_origin(url) in self._trusted

    def _minimum_rate(self, url: str) -> connections.MinimumRate:
        # Peers and mirrors can be replaced by the hub, which is the last source.
        replaceable = self._direct or (self._is_first_pass and not self._is_trusted(url))
        return connections.MinimumRate.for_source(self._transfer, replaceable=replaceable)

    def _read_chunks(self, url: str, response: BaseHTTPResponse) -> Iterator[bytes]:
        chunk_bytes = self._limit.chunk_bytes
        return connections.read_body(response, chunk_bytes, self._transfer, self._minimum_rate(url))

    def _read(self, url: str, response: BaseHTTPResponse, length: int) -> Iterator[bytes]:
        remaining = length
        for chunk in self._read_chunks(url, response):
            self._limit.take(len(chunk))
            self._count_received(len(chunk))
            remaining -= len(chunk)
            if remaining < 0:
                raise TransferError(url, "sent more bytes than requested", _OTHER_SOURCE)
            yield chunk
            if self.stop.is_set():
                raise connections.cancellation_error(url)
        if remaining:
            raise connections.RetryableError(f"the connection closed {remaining} bytes early")

    def _open(self, url: str, byte_range: tuple[int, int] | None) -> BaseHTTPResponse:
        with self._lock:
            address = self._locations.get(url, url)
        for _ in range(_REDIRECT_LIMIT):
            response = self._request(address, byte_range)
            if address == url:
                self._record_announcement(url, response.headers)
            target = response.get_redirect_location()
            if not target:
                break
            connections.release_connection(response, self._transfer)
            address = _resolve_redirect(address, target)
        else:
            raise TransferError(url, "redirects too many times", "check the address")
        status = response.status
        if status in (200, 206):
            with self._lock:
                self._locations[url] = address
            return response
        response.close()
        if status in _RETRY_STATUS:
            raise connections.RetryableError(f"HTTP {status}", _requested_pause_s(response))
        with self._lock:
            self._locations.pop(url, None)
        origin = connections.parse_origin(address)
        if status in _EXPIRED_STATUS and origin != connections.parse_origin(url):
            raise connections.RetryableError(
                f"HTTP {status} from {origin.host}: signed link expired"
            )
        fix = _STATUS_FIXES.get(status, _OTHER_SOURCE)
        error = NotFoundError if status == 404 else TransferError
        raise error(url, f"the server returned {status}", fix)

    def _request(self, address: str, byte_range: tuple[int, int] | None) -> BaseHTTPResponse:
        """Send a request; retry with a registry's token, or without a rejected token."""
        origin = connections.parse_origin(address)
        pool = self._pools.select(origin)
        headers = {
            "Accept": self._accept,
            "Accept-Encoding": "identity",
            "User-Agent": "spark-checkpoint",
        }
        if byte_range is not None:
            headers["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"

        def send(token: str | None) -> BaseHTTPResponse:
            login = {"Authorization": f"Bearer {token}"} if token else {}
            # The length is checked in _read(), which reports the missing bytes.
            return pool.request(
                "GET", address, headers={**headers, **login}, redirect=False, retries=False,
                preload_content=False, enforce_content_length=False,
            )  # fmt: skip

        is_trusted = origin in self._trusted
        token = self._token if is_trusted else None
        response = send(token)
        if response.status != 401 or not is_trusted:
            return response
        challenge = response.headers.get("WWW-Authenticate", "")
        new_token = None
        if challenge:
            new_token = connections.request_token(challenge, pool, origin.scheme, self._transfer)
        if new_token is None and token is None:
            return response
        connections.release_connection(response, self._transfer)
        response = send(new_token)
        if new_token is not None:
            self._token = new_token  # used until the next challenge
        elif response.status < 400:
            note(f"{address}: the hub rejected the token; continuing without it")
            self._token = None
        return response

    def _record_announcement(self, url: str, headers: Mapping[str, str]) -> None:
        commit, requested = headers.get("X-Repo-Commit"), _COMMIT.search(url)
        if commit and requested and commit != requested[1]:
            problem = f"the hub sent a different commit: {commit}"
            raise ValidationError(url, problem, "lock the repository again")
        size = headers.get("X-Linked-Size", "")
        size_bytes = int(size) if re.fullmatch(_DIGITS, size) else None
        announced_hash = headers.get("X-Linked-ETag", "").removeprefix("W/").strip('"') or None
        with self._lock:
            self._announced[url] = (size_bytes, announced_hash)

    def _count_received(self, count_bytes: int) -> None:
        with self._lock:
            self.received_bytes += count_bytes


def _requested_pause_s(response: BaseHTTPResponse) -> float:
    try:
        return _RETRY_AFTER.get_retry_after(response) or 0.0
    except (HTTPError, ValueError, OverflowError):
        return 0.0  # neither a number nor a date


def _resolve_redirect(address: str, location: str) -> str:
    try:
        target = urljoin(address, location)
        scheme = connections.parse_origin(target).scheme
    except ValueError as error:
        problem = f"redirects to an invalid address: {error}"
        raise TransferError(address, problem, "check the address") from error
    if address.startswith("https:") and scheme != "https":
        raise TransferError(address, "redirects from https to http", _OTHER_SOURCE)
    return target


def _check_length(
    url: str,
    response: BaseHTTPResponse,
    begin: int,
    end: int,
    total_bytes: int | None,
    *,
    whole: bool,
) -> int:
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise TransferError(url, f"sent the unsupported encoding {encoding}", _OTHER_SOURCE)
    expected = end - begin
    if response.status == 206 or not whole:
        first, last, total = _parse_content_range(url, response)
        if total_bytes is not None and total != total_bytes:
            fix = "lock the repository again"
            raise ValidationError(url, f"has {total} bytes, expected {total_bytes}", fix)
        if first != begin or last + 1 != min(end, total):
            problem = f"sent bytes {first}-{last} instead of {begin}-{end - 1}"
            raise TransferError(url, problem, _OTHER_SOURCE)
        expected = last + 1 - first
    announced = response.length_remaining
    if announced not in (None, expected):
        if whole:
            raise ValidationError(url, f"has {announced} bytes, expected {expected}", _OTHER_SOURCE)
        problem = f"announced {announced} bytes, expected {expected}"
        raise TransferError(url, problem, _OTHER_SOURCE)
    return expected


def _parse_content_range(url: str, response: BaseHTTPResponse) -> tuple[int, int, int]:
    if response.status != 206:
        raise RangeUnsupportedError(url, "sends the whole file instead of a range", _OTHER_SOURCE)
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
    if not match:
        raise TransferError(url, "sends a range without a valid Content-Range", _OTHER_SOURCE)
    return int(match[1]), int(match[2]), int(match[3])
