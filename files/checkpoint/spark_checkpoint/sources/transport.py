"""Reads byte ranges over HTTP, going on after interruptions and trusting no server's word.

Hub files are redirected to a content host with a signed, expiring address. The token goes to
the hub's origin only; an address that stopped working is asked for again; a range that was not
honoured exactly is refused, because its bytes would be written in the wrong place.

Redirects are followed here: what the hub says of a file stands in the answer that redirects, and
the signed address serves many ranges.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urljoin

from spark_contract.fetching import FetchFile, Wire
from spark_contract.units import COMMIT
from urllib3 import BaseHTTPResponse, Retry
from urllib3.exceptions import HTTPError

from spark_checkpoint.errors import GateRefused, TransferFailed
from spark_checkpoint.sources.connections import Connections, body_bytes, content_range, origin_of
from spark_checkpoint.sources.pacing import Again, Attempt, RateLimit, cancelled, pieces, put_back

_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_EXPIRED = frozenset({400, 401, 403, 404, 410})
_FAILURES = (Again, HTTPError, OSError)
_COMMIT = re.compile(rf"/resolve/({COMMIT})(?:/|$)")
_REDIRECT_LIMIT = 10
_GATED = (
    "accept its terms on its page of the hub, run `hf auth login` or set hub.token, "
    "then run the deploy again"
)
_PAUSES = Retry(retry_after_max=120)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Promise:
    """What a hub says of a file before it redirects; None where it says nothing."""

    size_bytes: int | None
    content_hash: str | None  # sha256 of large files, git blob sha1 of small ones


class Transport:
    """A client for one order; its methods may be called from several threads."""

    def __init__(
        self,
        wire: Wire,
        trusted_urls: tuple[str, ...],
        *,
        direct: bool = False,
        stop: threading.Event | None = None,
        accept: str = "*/*",
    ):
        """Make a client.

        Args:
            wire: how patient to be.
            trusted_urls: whose hosts may see the token.
            direct: whatever proxy there is knows no way to these hosts.
            stop: set when reads shall end soon; one of its own when left out.
            accept: which kinds of answer are understood.
        """
        self._wire = wire
        self._connections = Connections(wire, trusted_urls, direct=direct, accept=accept)
        self._limit = RateLimit(wire.rate_limit_bytes_per_s)
        self._lock = threading.Lock()
        self._locations: dict[str, str] = {}
        self._promises: dict[str, _Promise] = {}
        self.stop = stop or threading.Event()
        self.received_bytes = 0

    def cancel(self) -> None:
        """Let every read of every thread end soon; what was received stays."""
        self.stop.set()

    def refuse_other_content(self, url: str, file: FetchFile) -> None:
        """Stop at the first byte when the hub itself names other content than the lock."""
        promise = self._promises.get(url)
        if promise is None:
            return
        tag = promise.content_hash
        known = {64: file.sha256, 40: file.git_sha1}.get(len(tag or ""))
        if promise.size_bytes not in (None, file.size_bytes) or (known and tag != known):
            raise GateRefused(
                url,
                f"the hub offers {promise.size_bytes} bytes with hash {tag}, the lock says "
                f"{file.size_bytes} and {file.sha256 or file.git_sha1}",
                "lock the repository again",
            )

    def read(self, url: str, begin: int, end: int, total_bytes: int | None = None) -> bytes:
        """Return the bytes of a small range; fewer when the file ends before ``end``."""
        return b"".join(self.stream(url, begin, end, total_bytes))

    def has(self, url: str) -> bool:
        """Return whether a file of at least a byte is there now; nothing is tried again."""
        try:
            self._open(url, (0, 1)).close()
        except (TransferFailed, *_FAILURES):
            return False
        return True

    def read_start(self, url: str, count_bytes: int) -> tuple[int, bytes]:
        """Return a file's size and its first bytes, from one request."""

        def once() -> tuple[int, bytes]:
            with self._open(url, (0, count_bytes)) as response:
                total = content_range(url, response)[2]
                length = body_bytes(url, response, 0, count_bytes, total, whole=False)
                return total, b"".join(self._body(url, response, length))

        return self._until_answered(url, once)

    def read_whole(self, url: str, limit_bytes: int) -> bytes:
        """Return a small file of unknown size."""

        def once() -> bytes:
            with self._open(url, None) as response:
                body = bytearray()
                for piece in pieces(response, self._limit.piece_bytes, self._wire):
                    self._count(len(piece))
                    body += piece
                    if len(body) > limit_bytes:
                        what = f"is above {limit_bytes} bytes"
                        raise GateRefused(url, what, "check the repository")
                left = response.length_remaining
            if left:
                raise Again(f"the connection ended {left} bytes early")
            return bytes(body)

        return self._until_answered(url, once)

    def stream(
        self, url: str, begin: int, end: int, total_bytes: int | None = None
    ) -> Iterator[bytes]:
        """Yield the bytes ``[begin, end)`` of a file in order.

        Goes on where it stopped after an interruption. ``total_bytes`` is the size the file
        must have. A plain 200 is accepted only for a whole file.

        Raises:
            RangeIgnored: the server cannot send parts.
            TransferFailed: no progress in as many tries as the order allows.
        """
        position = begin
        attempt = self._attempt(url)
        while position < end:
            try:
                for piece in self._read_range(url, position, end, total_bytes):
                    position += len(piece)
                    attempt.progressed(len(piece))
                    yield piece
                return
            except _FAILURES as error:
                attempt.failed(error)

    def _attempt(self, url: str) -> Attempt:
        # Mirrors and peers are given up for the next source; after the hub there is none.
        outage_s = self._wire.outage_s if self._connections.trusts(url) else 0.0
        return Attempt(url, self._wire, self.stop, outage_s)

    def _until_answered(self, url: str, once: Callable[[], T]) -> T:
        attempt = self._attempt(url)
        while True:
            try:
                return once()
            except _FAILURES as error:
                attempt.failed(error)

    def _read_range(
        self, url: str, begin: int, end: int, total_bytes: int | None
    ) -> Iterator[bytes]:
        whole = begin == 0 and total_bytes is not None and end == total_bytes
        with self._open(url, None if whole else (begin, end)) as response:
            length = body_bytes(url, response, begin, end, total_bytes, whole=whole)
            yield from self._body(url, response, length)

    def _body(self, url: str, response: BaseHTTPResponse, length: int) -> Iterator[bytes]:
        left = length
        for piece in pieces(response, self._limit.piece_bytes, self._wire):
            self._limit.take(len(piece))
            self._count(len(piece))
            left -= len(piece)
            if left < 0:
                raise TransferFailed(url, "sent more bytes than asked for", "use another source")
            yield piece
            if self.stop.is_set():
                raise cancelled(url)
        if left:
            raise Again(f"the connection ended {left} bytes early")

    def _open(self, url: str, byte_range: tuple[int, int] | None) -> BaseHTTPResponse:
        """Send one request, following redirects, and return an answer with status 200 or 206."""
        with self._lock:
            address = self._locations.get(url, url)
        for _ in range(_REDIRECT_LIMIT):
            response = self._connections.ask(address, byte_range)
            if address == url:
                self._note_promise(url, response.headers)
            target = response.get_redirect_location()
            if not target:
                break
            put_back(response, self._wire)
            address = _redirected(address, target)
        else:
            raise TransferFailed(url, "redirects in a circle", "check the address")
        if response.status in (200, 206):
            with self._lock:
                self._locations[url] = address
            return response
        response.close()
        raise self._refused(url, address, response)

    def _note_promise(self, url: str, headers: Mapping[str, str]) -> None:
        commit, asked = headers.get("X-Repo-Commit"), _COMMIT.search(url)
        if commit and asked and commit != asked[1]:
            raise GateRefused(
                url, f"the hub answers with commit {commit}", "lock the repository again"
            )
        size = headers.get("X-Linked-Size", "")
        tag = headers.get("X-Linked-ETag", "").removeprefix("W/").strip('"')
        promise = _Promise(int(size) if size.isdigit() else None, tag or None)
        with self._lock:
            self._promises[url] = promise

    def _refused(self, url: str, address: str, response: BaseHTTPResponse) -> Exception:
        """Return ``Again`` for what is worth repeating, else the error."""
        status = response.status
        if status in _TRY_AGAIN:
            return Again(f"HTTP {status}", _PAUSES.get_retry_after(response) or 0.0)
        with self._lock:
            self._locations.pop(url, None)
        # Another host speaks of its signed link, which the hub replaces; the hub itself of us.
        if status in _EXPIRED and origin_of(address) != origin_of(url):
            return Again(f"HTTP {status} from {origin_of(address)[1]}: the signed link expired")
        fixes = {
            # What the public hub says of a name that it does not know, too.
            401: f"check the name; if it is private or gated, {_GATED}",
            403: _GATED,
            404: "check the repository's name and its revision or commit",
        }
        fix = fixes.get(status, "use another source")
        return TransferFailed(url, f"the server answers {status}", fix)

    def _count(self, count_bytes: int) -> None:
        with self._lock:
            self.received_bytes += count_bytes


def _redirected(address: str, location: str) -> str:
    target = urljoin(address, location)
    try:
        scheme = origin_of(target)[0]
    except ValueError as error:
        raise TransferFailed(address, f"redirects to {error}", "check the address") from error
    if address.startswith("https:") and scheme != "https":
        raise TransferFailed(address, "redirects from https to http", "use another source")
    return target
