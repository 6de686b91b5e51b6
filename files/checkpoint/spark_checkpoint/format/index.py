"""Reads the map of an index pair by pair: a large model's whole document fills memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from spark_checkpoint.errors import GateRefused

_KEY = "weight_map"
_SPACE = rb"[ \t\n\r]*"
_PLAIN = _SPACE + rb'"([^"\\\x00-\x1f]*)"' + _SPACE
_MAP = re.compile(rb'"weight_map"' + _SPACE + b":" + _SPACE + rb"\{")
_PAIR = re.compile(_PLAIN + b":" + _PLAIN + rb"([,}])")


def weight_map(
    raw: bytes, where: str, fix: str, keep: Callable[[str], bool] = lambda name: True
) -> dict[str, str]:
    """Return name → file of the names to keep, from the bytes of an index.

    Raises:
        GateRefused: it is no JSON object, or has no map of names to files.
    """
    try:
        found = _plain_map(raw, keep)
        document = json.loads(raw.decode("utf-8")) if found is None else {}
    except (ValueError, RecursionError) as error:
        raise GateRefused(where, f"is not JSON ({error})", fix) from error
    if found is not None:
        return found
    names = document.get(_KEY) if isinstance(document, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise GateRefused(where, "has no weight_map of names to files", fix)
    return {name: file for name, file in names.items() if keep(name)}


def _plain_map(raw: bytes, keep: Callable[[str], bool]) -> dict[str, str] | None:
    """Return the map of a document written as everybody writes it; None of any other.

    What is around the map is parsed as JSON with a mark in its place, so that it is the document's
    own and last map, not one inside of something else.
    """
    begin = _MAP.search(raw)
    if begin is None:
        return None
    found: dict[str, str] = {}
    files: dict[bytes, str] = {}
    position, sign = begin.end(), b","
    while sign == b",":
        pair = _PAIR.match(raw, position)
        if pair is None:
            return None
        name, sign, position = pair[1].decode("utf-8"), pair[3], pair.end()
        if keep(name):
            # One object for each file, however many names it holds.
            file = files.get(pair[2])
            found[name] = file or files.setdefault(pair[2], pair[2].decode("utf-8"))
    marks: list[str] = []
    mark = object()

    def marked(constant: str) -> object:
        marks.append(constant)
        return mark

    around = raw[: begin.end() - 1] + b"NaN" + raw[position:]
    rest: Any = json.loads(around.decode("utf-8"), parse_constant=marked)
    own = isinstance(rest, dict) and rest.get(_KEY) is mark and len(marks) == 1
    return found if own else None
