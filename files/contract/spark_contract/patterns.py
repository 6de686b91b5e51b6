"""Expand patterns with shell braces into exact names: ``layers.{0..2}.{gate,up}_proj``.

A brace holds either a range with an optional step (``{3..47..4}``) or two or more different words.
Braces do not nest: the builder on the host reads the same grammar.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

_BRACE = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.([1-9]\d*))?")


class PatternError(ValueError):
    """A pattern cannot be expanded, or two patterns give the same name."""


def expand(pattern: str) -> Iterator[str]:
    """Yield every name of ``pattern``, in its own order."""
    return map("".join, itertools.product(*_parts(pattern)))


def count(pattern: str) -> int:
    """Return how many names ``pattern`` stands for, without making them."""
    return math.prod(len(part) for part in _parts(pattern))


def expand_all(patterns: Sequence[str]) -> frozenset[str]:
    """Return all names of ``patterns``; a name given twice is a mistake."""
    names: set[str] = set()
    for pattern in patterns:
        for name in expand(pattern):
            if name in names:
                raise PatternError(f"{pattern!r} gives {name!r} a second time")
            names.add(name)
    return frozenset(names)


def _parts(pattern: str) -> list[list[str]]:
    """Split into literal text (one choice) and braces (several)."""
    parts: list[list[str]] = []
    position = 0
    for match in _BRACE.finditer(pattern):
        parts += [[pattern[position : match.start()]], _choices(match[1], pattern)]
        position = match.end()
    parts.append([pattern[position:]])
    if any("{" in part[0] or "}" in part[0] for part in parts if len(part) == 1):
        raise PatternError(f"{pattern!r}: a brace is not closed, or braces are nested")
    return parts


def _choices(body: str, pattern: str) -> list[str]:
    match = _RANGE.fullmatch(body)
    if match:
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        if first > last:
            raise PatternError(f"{pattern!r}: the range {{{body}}} is empty")
        return [str(number) for number in range(first, last + 1, step)]
    words = body.split(",")
    if len(words) < 2 or len(set(words)) != len(words):
        raise PatternError(f"{pattern!r}: {{{body}}} needs two or more different words")
    return words
