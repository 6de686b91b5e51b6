"""Joins neighbouring byte ranges of one file into few requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Bytes between two wanted ranges that are cheaper to read along than to ask around.
GAP_BYTES = 64 << 10
# A request this long is lost and repeated at most; more of them keep all connections busy.
REQUEST_LIMIT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class NamedRange:
    """Bytes ``[begin, end)`` of a file, wanted under a name."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Request:
    """One range to read, and the wanted pieces that lie whole inside it."""

    begin: int
    end: int
    pieces: tuple[NamedRange, ...]


def merge(
    wanted: Iterable[NamedRange], gap_bytes: int = GAP_BYTES, limit_bytes: int = REQUEST_LIMIT_BYTES
) -> list[Request]:
    """Return requests covering all wanted ranges; a piece is never split between two."""
    requests: list[Request] = []
    for piece in sorted(wanted, key=lambda item: (item.begin, item.end)):
        last = requests[-1] if requests else None
        if (
            last is not None
            and piece.begin - last.end <= gap_bytes
            and max(last.end, piece.end) - last.begin <= limit_bytes
        ):
            end = max(last.end, piece.end)
            requests[-1] = Request(last.begin, end, (*last.pieces, piece))
        else:
            requests.append(Request(piece.begin, piece.end, (piece,)))
    return requests
