"""Reads byte ranges over HTTP, going on after interruptions and trusting no server's word.

Hub files are redirected to a content host with a signed, expiring address. The token goes to
the hub's origin only; an address that stopped working is asked for again; a range that was not
honoured exactly is refused, because its bytes would be written in the wrong place.
"""

from __future__ import annotations

import http.client
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from urllib.parse import urljoin

from spark_checkpoint.connections import Connections, origin_of
from spark_checkpoint.errors import GateRefused, InputRefused, TransferFailed
from spark_checkpoint.plan import Wire
from spark_checkpoint.progress import note

PIECE_BYTES = 1 << 20
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_EXPIRED = frozenset({400, 401, 403, 404, 410})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_COMMIT = re.compile(r"/resolve/([0-9a-f]{40})(?:/|$)")
_PAUSE_LIMIT_S = 30.0
_REDIRECT_LIMIT = 10


class RangeIgnored(TransferFailed):
    """The server sent the whole file although a part was asked for."""


class _Again(Exception):  # noqa: N818 - a signal between two functions of this file
    """The request may work when it is repeated."""

    def __init__(self, reason: str, pause_s: float = 0.0):
        super().__init__(reason)
        self.pause_s = pause_s


@dataclass(frozen=True, slots=True)
class Promise:
    """What a hub says of a file before it redirects; None where it says nothing."""

    size_bytes: int | None
    content_hash: str | None  # sha256 of large files, git blob sha1 of small ones


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


class Transport:
    """A client for one order; its methods may be called from several threads."""

    def __init__(self, wire: Wire, trusted_urls: tuple[str, ...]):
        self._wire = wire
        self._connections = Connections(wire.timeout_s)
        self._limit = RateLimit(wire.rate_limit_bytes_per_s)
        self._token = _read_token(wire.token_file)
        try:
            self._trusted = frozenset(origin_of(url) for url in trusted_urls)
        except ValueError as error:
            raise InputRefused("sources", str(error), "correct the address") from error
        self._lock = threading.Lock()
        self._locations: dict[str, str] = {}
        self._promises: dict[str, Promise] = {}
        self._cancelled = threading.Event()
        self.received_bytes = 0
        self.requests = 0

    def cancel(self) -> None:
        """Let every read of every thread end soon; what was received stays."""
        self._cancelled.set()

    def promise(self, url: str) -> Promise | None:
        """Return what the hub said of a file that was asked for already."""
        return self._promises.get(url)

    def read(self, url: str, begin: int, end: int, total_bytes: int | None = None) -> bytes:
        """Return the bytes of a small range; fewer when the file ends before ``end``."""
        return b"".join(bytes(piece) for piece in self.stream(url, begin, end, total_bytes))

    def read_start(self, url: str, count_bytes: int) -> tuple[int, bytes]:
        """Return a file's size and its first bytes, from one request."""
        for attempt in self._attempts(url):
            try:
                response = self._open(url, (0, count_bytes))
                with response:
                    total = _content_range(url, response)[2]
                    wanted = min(count_bytes, total)
                    _body_bytes(url, response, 0, count_bytes, total, whole=False)
                    body = response.read(wanted)
                self._count(len(body))
                if len(body) == wanted:
                    return total, body
                raise _Again("the answer ended early")
            except (_Again, OSError, http.client.HTTPException) as error:
                self._connections.drop(self._locations.get(url, url))
                attempt.failed(error)
        raise TransferFailed(url, "gave no answer", "try again later")

    def read_whole(self, url: str, limit_bytes: int) -> bytes:
        """Return a small file of unknown size."""
        for attempt in self._attempts(url):
            try:
                response = self._open(url, None)
                with response:
                    body = response.read(limit_bytes + 1)
                    if response.length:
                        raise _Again("the answer ended early")
                self._count(len(body))
                if len(body) > limit_bytes:
                    raise GateRefused(url, f"is above {limit_bytes} bytes", "check the repository")
                return body
            except (_Again, OSError, http.client.HTTPException) as error:
                self._connections.drop(self._locations.get(url, url))
                attempt.failed(error)
        raise TransferFailed(url, "gave no answer", "try again later")

    def stream(
        self, url: str, begin: int, end: int, total_bytes: int | None = None
    ) -> Iterator[memoryview]:
        """Yield the bytes ``[begin, end)`` of a file in order; a view is valid until the next.

        Goes on where it stopped after an interruption. ``total_bytes`` is the size the file
        must have. A plain 200 is accepted only for a whole file.

        Raises:
            RangeIgnored: the server cannot send parts.
            TransferFailed: no progress in as many tries as the order allows.
        """
        position = begin
        attempts = self._attempts(url)
        for attempt in attempts:
            if position >= end:
                return
            try:
                for piece in self._read_range(url, position, end, total_bytes):
                    position += len(piece)
                    attempt.progressed()
                    yield piece
                return
            except (_Again, OSError, http.client.HTTPException) as error:
                self._connections.drop(self._locations.get(url, url))
                attempt.failed(error)

    def _read_range(
        self, url: str, begin: int, end: int, total_bytes: int | None
    ) -> Iterator[memoryview]:
        whole = begin == 0 and total_bytes is not None and end == total_bytes
        response = self._open(url, None if whole else (begin, end))
        with response:
            length = _body_bytes(url, response, begin, end, total_bytes, whole=whole)
            buffer = memoryview(bytearray(min(self._limit.piece_bytes, max(length, 1))))
            left = length
            while left:
                count = response.readinto(buffer[: min(left, len(buffer))])
                if not count:
                    raise _Again(f"the connection ended {left} bytes early")
                self._limit.take(count)
                self._count(count)
                left -= count
                yield buffer[:count]
                if self._cancelled.is_set():
                    raise _cancelled(url)
            if response.read(1):
                raise TransferFailed(url, "sent more bytes than asked for", "use another source")

    def _open(self, url: str, byte_range: tuple[int, int] | None) -> http.client.HTTPResponse:
        """Send one request, following redirects, and return an answer with status 200 or 206."""
        with self._lock:
            location = self._locations.get(url)
        address = location or url
        for _ in range(_REDIRECT_LIMIT):
            response = self._connections.request(address, self._headers(address, byte_range))
            with self._lock:
                self.requests += 1
            if address == url:
                self._note_promise(url, response.headers)
            if response.status not in _REDIRECTS:
                break
            address = self._redirected(address, response)
        else:
            raise TransferFailed(url, "redirects in a circle", "check the address")
        if response.status in (200, 206):
            with self._lock:
                self._locations[url] = address
            return response
        self._refuse_status(url, address, response)
        raise _Again(f"HTTP {response.status}")

    def _headers(self, address: str, byte_range: tuple[int, int] | None) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity", "User-Agent": "spark-checkpoint"}
        if byte_range is not None:
            headers["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
        if self._token and origin_of(address) in self._trusted:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def _redirected(self, address: str, response: http.client.HTTPResponse) -> str:
        target = urljoin(address, response.headers.get("Location", ""))
        response.read()
        try:
            secure = origin_of(target).scheme == "https"
        except ValueError as error:
            raise TransferFailed(address, f"redirects to {error}", "check the address") from error
        if address.startswith("https:") and not secure:
            raise TransferFailed(address, "redirects from https to http", "use another source")
        return target

    def _note_promise(self, url: str, headers: Message) -> None:
        commit, asked = headers.get("X-Repo-Commit"), _COMMIT.search(url)
        if commit and asked and commit != asked[1]:
            raise GateRefused(
                url, f"the hub answers with commit {commit}", "lock the repository again"
            )
        size = headers.get("X-Linked-Size", "")
        tag = (headers.get("X-Linked-ETag") or "").removeprefix("W/").strip('"')
        promise = Promise(int(size) if size.isdigit() else None, tag or None)
        with self._lock:
            self._promises[url] = promise

    def _refuse_status(self, url: str, address: str, response: http.client.HTTPResponse) -> None:
        """Raise unless the request is worth repeating."""
        status = response.status
        self._connections.drop(address)
        if status in _TRY_AGAIN:
            raise _Again(f"HTTP {status}", _retry_after_s(response.headers))
        with self._lock:
            self._locations.pop(url, None)
        # Another host speaks of its signed link, which the hub replaces; the hub itself of us.
        if status in _EXPIRED and origin_of(address) != origin_of(url):
            raise _Again(f"HTTP {status} from {origin_of(address).host}: the signed link expired")
        fixes = {401: "give a token", 403: "give a token that may read it", 404: "check the lock"}
        raise TransferFailed(
            url, f"the server answers {status}", fixes.get(status, "use another source")
        )

    def _count(self, count_bytes: int) -> None:
        with self._lock:
            self.received_bytes += count_bytes

    def _attempts(self, url: str) -> Iterator[_Attempt]:
        attempt = _Attempt(url, self._wire, self._cancelled)
        while True:
            yield attempt


class _Attempt:
    """Counts tries without progress and pauses between them."""

    def __init__(self, url: str, wire: Wire, cancelled: threading.Event):
        self._url, self._wire, self._cancelled = url, wire, cancelled
        self._failures = 0

    def progressed(self) -> None:
        self._failures = 0

    def failed(self, error: Exception) -> None:
        """Pause before the next try, or give up."""
        self._failures += 1
        reason = str(error) or type(error).__name__
        if self._failures >= self._wire.tries:
            raise TransferFailed(
                self._url,
                f"no progress in {self._failures} tries, last: {reason}",
                "check the network, then run again: it goes on from here",
            ) from error
        pause_s = min(_PAUSE_LIMIT_S, self._wire.backoff_s * 2 ** (self._failures - 1))
        # Spread the retries of parallel requests, which were refused together.
        pause_s *= random.uniform(0.5, 1.0)
        if isinstance(error, _Again):
            pause_s = max(pause_s, error.pause_s)
        note(f"retry: {self._url}: {reason}; again in {pause_s:.1f} s")
        if self._cancelled.wait(pause_s):
            raise _cancelled(self._url) from error


def _cancelled(url: str) -> TransferFailed:
    return TransferFailed(url, "was given up because another part failed", "see that message")


def _body_bytes(
    url: str,
    response: http.client.HTTPResponse,
    begin: int,
    end: int,
    total_bytes: int | None,
    *,
    whole: bool,
) -> int:
    """Return how many bytes the answer must bring, or refuse an answer to another question."""
    fix = "use another source"
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise TransferFailed(url, f"answers with encoding {encoding}", fix)
    if response.status == 200 and not whole:
        raise RangeIgnored(url, "sends the whole file where a range was asked for", fix)
    if response.status == 206:
        first, last, total = _content_range(url, response)
        if total_bytes is not None and total != total_bytes:
            raise GateRefused(url, f"is {total} bytes long, not {total_bytes}", "lock it again")
        if first != begin or last + 1 != min(end, total):
            raise TransferFailed(url, f"sends bytes {first}-{last} for {begin}-{end - 1}", fix)
        expected = last + 1 - first
    else:
        expected = end - begin
    if response.length is not None and response.length != expected:
        if whole:
            raise GateRefused(url, f"is {response.length} bytes long, not {expected}", fix)
        raise TransferFailed(url, f"announces {response.length} bytes for {expected}", fix)
    return expected


def _content_range(url: str, response: http.client.HTTPResponse) -> tuple[int, int, int]:
    """Return first byte, last byte and file size an answer with a part states."""
    if response.status != 206:
        raise RangeIgnored(
            url, "sends the whole file where a range was asked for", "use another source"
        )
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
    if not match:
        raise TransferFailed(
            url, "sends a part without a readable Content-Range", "use another source"
        )
    return int(match[1]), int(match[2]), int(match[3])


def _retry_after_s(headers: Message) -> float:
    text = headers.get("Retry-After", "").strip()
    return min(float(text), 120.0) if text.isdigit() else 0.0


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text("utf-8").strip()
    except OSError as error:
        raise InputRefused(
            str(path), f"token cannot be read ({error.strerror})", "check token_file"
        ) from error
    if not token or not token.isprintable() or " " in token:
        raise InputRefused(str(path), "holds no token", "write the token alone into it")
    return token
