"""Holds an HTTP answer against the question: the right range of the right file, unencoded."""

from __future__ import annotations

import re

from urllib3 import BaseHTTPResponse

from spark_checkpoint.errors import GateRefused, TransferFailed

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class RangeIgnored(TransferFailed):
    """The server sent the whole file although a part was asked for."""


def body_bytes(
    url: str,
    response: BaseHTTPResponse,
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
    if response.status == 206 or not whole:
        first, last, total = content_range(url, response)
        if total_bytes is not None and total != total_bytes:
            raise GateRefused(url, f"is {total} bytes long, not {total_bytes}", "lock it again")
        if first != begin or last + 1 != min(end, total):
            raise TransferFailed(url, f"sends bytes {first}-{last} for {begin}-{end - 1}", fix)
        expected = last + 1 - first
    else:
        expected = end - begin
    announced = response.length_remaining
    if announced not in (None, expected):
        if whole:
            raise GateRefused(url, f"is {announced} bytes long, not {expected}", fix)
        raise TransferFailed(url, f"announces {announced} bytes for {expected}", fix)
    return expected


def content_range(url: str, response: BaseHTTPResponse) -> tuple[int, int, int]:
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
