"""Values that a document cannot hold: what YAML and JSON can say and no setting can mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

KeyPath = tuple[str | int, ...]
_DEEPEST = 32  # levels; more would end in the interpreter's limit somewhere later
# From here on a float does not hold every whole number, and a size in bytes may overflow one.
_LIMITS = {float: 2**53, int: 2**63}
Odd = tuple[KeyPath, str, str]  # where, what, fix


def odd_values(data: Any, path: KeyPath = ()) -> Iterator[Odd]:
    """Yield each value that is no text, number, true, false, null, list or mapping of text."""
    if len(path) > _DEEPEST:
        yield (
            path[:3],
            "nests too deeply, or holds itself",
            "write fewer levels, no alias of itself",
        )
    elif isinstance(data, dict):
        for key, value in data.items():
            if isinstance(key, str):
                yield from odd_values(key, path)
                yield from odd_values(value, (*path, key))
            else:
                yield path, f"{key!r} is not text", f'write it in quotes: "{key}"'
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from odd_values(value, (*path, number))
    elif isinstance(data, (int, float)):
        yield from ((path, what, fix) for what, fix in _wrong_numbers(data))
    elif isinstance(data, str) and not _is_unicode(data):
        yield path, "holds half a character", "write the text anew"
    elif data is not None and not isinstance(data, str):
        what = f"{data} is a {type(data).__name__}, not text or a number"
        yield path, what, f'write text in quotes: "{data}"'


def _wrong_numbers(number: float) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a number, and what to do."""
    limit = _LIMITS[float] if isinstance(number, float) else _LIMITS[int]
    if isinstance(number, float) and not math.isfinite(number):
        yield f"{number} is no number that can be used", "write a finite number"
    elif abs(number) >= limit:
        yield "is a number too large to be used", f"write one below {limit}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
