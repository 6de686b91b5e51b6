"""Values that a document cannot hold: what YAML and JSON can say and no setting can mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

KeyPath = tuple[str | int, ...]
_DEEPEST = 32  # levels; more would end in the interpreter's limit somewhere later
_SHOWN = 60  # characters of a value, in a message
MOST_VALUES = 200_000  # of a document; aliases of aliases make billions of a few lines
# From here on a float does not hold every whole number, and a size in bytes may overflow one.
_LIMITS = {float: 2**53, int: 2**63}
Odd = tuple[KeyPath, str, str]  # where, what, fix


def odd_values(data: Any) -> Iterator[Odd]:
    """Yield each value that is no text, number, true, false, null, list or mapping of text."""
    if _holds_more_than(MOST_VALUES, data):
        yield (), f"holds more than {MOST_VALUES} values", "write fewer, no alias of aliases"
    else:
        yield from _odd(data, ())


def _holds_more_than(most: int, data: Any) -> bool:
    """Whether there are more values, counted as often as they are reached."""
    level, seen = [data], 0
    for _ in range(_DEEPEST + 2):
        inner = (
            list(one.values()) if isinstance(one, dict) else one
            for one in level
            if isinstance(one, (dict, list))
        )
        level = list(islice(chain.from_iterable(inner), most + 1))
        seen += len(level)
        if seen > most:
            return True
    return False


def _odd(data: Any, path: KeyPath) -> Iterator[Odd]:
    if len(path) > _DEEPEST:
        yield (
            path[:3],
            "nests too deeply, or holds itself",
            "write fewer levels, no alias of itself",
        )
    elif isinstance(data, dict):
        for key, value in data.items():
            if isinstance(key, str):
                yield from _odd(key, path)
                yield from _odd(value, (*path, key))
            else:
                said = repr(key)[:_SHOWN]
                yield path, f"{said} is not text", f'write it in quotes: "{said}"'
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from _odd(value, (*path, number))
    elif isinstance(data, (int, float)):
        yield from ((path, what, fix) for what, fix in _wrong_numbers(data))
    elif isinstance(data, str) and not _is_unicode(data):
        yield path, "holds half a character", "write the text anew"
    elif data is not None and not isinstance(data, str):
        said = str(data)[:_SHOWN]
        what = f"{said} is a {type(data).__name__}, not text or a number"
        yield path, what, f'write text in quotes: "{said}"'


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
