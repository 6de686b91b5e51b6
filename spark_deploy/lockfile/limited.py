"""Asks in bounded time: a server that trickles keeps every limit on silence waiting for ever."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPMessage
from queue import Empty, Queue
from typing import IO, TypeVar
from urllib.parse import urlsplit

# A look-up reads a few megabytes at most: a line of 15 KB/s brings them by then.
LIMIT_S = 300.0

T = TypeVar("T")


def within(limit_s: float, ask: Callable[[], T]) -> T:
    """Return what is answered in time.

    Raises:
        TimeoutError: nothing whole was; nobody waits for it any more.
    """
    told: Queue[tuple[T | None, BaseException | None]] = Queue()

    def run() -> None:
        try:
            told.put((ask(), None))
        except BaseException as error:  # whatever it is, it is raised where it was asked for
            told.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = told.get(timeout=limit_s)
    except Empty:
        raise TimeoutError(f"no whole answer within {limit_s:.0f} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


class _PlainRedirects(urllib.request.HTTPRedirectHandler):
    """Leads from http to http or https, and from https to https; to no other protocol."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str,
        headers: HTTPMessage, newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after not in ("https", before):
            raise urllib.error.URLError(f"it redirects from {before} to {after}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


opened = urllib.request.build_opener(_PlainRedirects).open
