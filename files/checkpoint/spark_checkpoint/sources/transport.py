"""Reads byte ranges over HTTP, going on after interruptions and trusting no server's word.

Hub files are redirected to a content host with a signed, expiring address. The token goes to
the hub's origin only; an address that stopped working is asked for again; a range that was not
honoured exactly is refused, because its bytes would be written in the wrong place.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from urllib.parse import urljoin

from spark_checkpoint.errors import GateRefused, InputRefused, TransferFailed
from spark_checkpoint.plan import Wire
from spark_checkpoint.sources.connections import Connections, origin_of
from spark_checkpoint.sources.pacing import Again, Attempt, RateLimit, cancelled
from spark_checkpoint.sources.responses import body_bytes, content_range, retry_after_s

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_EXPIRED = frozenset({400, 401, 403, 404, 410})
_COMMIT = re.compile(r"/resolve/([0-9a-f]{40})(?:/|$)")
_REDIRECT_LIMIT = 10


@dataclass(frozen=True, slots=True)
class Promise:
    """What a hub says of a file before it redirects; None where it says nothing."""

    size_bytes: int | None
    content_hash: str | None  # sha256 of large files, git blob sha1 of small ones


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
                    total = content_range(url, response)[2]
                    wanted = min(count_bytes, total)
                    body_bytes(url, response, 0, count_bytes, total, whole=False)
                    body = response.read(wanted)
                self._count(len(body))
                if len(body) == wanted:
                    return total, body
                raise Again("the answer ended early")
            except (Again, OSError, http.client.HTTPException) as error:
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
                        raise Again("the answer ended early")
                self._count(len(body))
                if len(body) > limit_bytes:
                    raise GateRefused(url, f"is above {limit_bytes} bytes", "check the repository")
                return body
            except (Again, OSError, http.client.HTTPException) as error:
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
            except (Again, OSError, http.client.HTTPException) as error:
                self._connections.drop(self._locations.get(url, url))
                attempt.failed(error)

    def _read_range(
        self, url: str, begin: int, end: int, total_bytes: int | None
    ) -> Iterator[memoryview]:
        whole = begin == 0 and total_bytes is not None and end == total_bytes
        response = self._open(url, None if whole else (begin, end))
        with response:
            length = body_bytes(url, response, begin, end, total_bytes, whole=whole)
            buffer = memoryview(bytearray(min(self._limit.piece_bytes, max(length, 1))))
            left = length
            while left:
                count = response.readinto(buffer[: min(left, len(buffer))])
                if not count:
                    raise Again(f"the connection ended {left} bytes early")
                self._limit.take(count)
                self._count(count)
                left -= count
                yield buffer[:count]
                if self._cancelled.is_set():
                    raise cancelled(url)
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
        raise Again(f"HTTP {response.status}")

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
            raise Again(f"HTTP {status}", retry_after_s(response.headers))
        with self._lock:
            self._locations.pop(url, None)
        # Another host speaks of its signed link, which the hub replaces; the hub itself of us.
        if status in _EXPIRED and origin_of(address) != origin_of(url):
            raise Again(f"HTTP {status} from {origin_of(address).host}: the signed link expired")
        fixes = {
            401: "give a token",
            403: "give a token that may read it",
            404: "check the repository's name and its revision or commit",
        }
        raise TransferFailed(
            url, f"the server answers {status}", fixes.get(status, "use another source")
        )

    def _count(self, count_bytes: int) -> None:
        with self._lock:
            self.received_bytes += count_bytes

    def _attempts(self, url: str) -> Iterator[Attempt]:
        attempt = Attempt(url, self._wire, self._cancelled)
        while True:
            yield attempt


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
