"""Expand patterns with shell braces into exact names: ``layers.{0..2}.{gate,up}_proj``.

A brace holds either a range with an optional step (``{3..47..4}``) or two or more different words.
Braces do not nest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator

from spark_contract.errors import HostToolError

NAME_LIMIT = 2_000_000
_BRACE = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.([1-9]\d*))?")


class PatternError(HostToolError):
    """A pattern cannot be expanded, or two patterns give the same name."""

    def __init__(self, pattern: str, what: str):
        super().__init__(f"pattern {pattern!r}", what, "correct the pattern", exit_code=2)


def expand(pattern: str) -> Iterator[str]:
    """Yield every name of ``pattern``, in its own order."""
    return map("".join, itertools.product(*_parts(pattern)))


def count(pattern: str) -> int:
    """Return how many names ``pattern`` stands for, without making them."""
    return math.prod(len(part) for part in _parts(pattern))


def uses_up(names: set[str], patterns: Iterable[str]) -> bool:
    """Whether the patterns give exactly these names, each once; ``names`` is taken apart.

    The set is all the memory this takes: no pattern is ever expanded as a whole.
    """
    for pattern in patterns:
        for name in expand(pattern):
            if name not in names:
                return False
            names.remove(name)
    return not names


def expand_all(patterns: Iterable[str]) -> set[str]:
    """Return all names of ``patterns``; a name given twice is a mistake."""
    names: set[str] = set()
    for pattern in patterns:
        for name in expand(pattern):
            if name in names:
                raise PatternError(pattern, f"gives {name!r} a second time")
            names.add(name)
    return names


def _parts(pattern: str) -> list[list[str]]:
    """Split into literal text (one choice) and braces (several)."""
    parts: list[list[str]] = []
    position = 0
    for match in _BRACE.finditer(pattern):
        parts += [[pattern[position : match.start()]], _choices(match[1], pattern)]
        position = match.end()
    parts.append([pattern[position:]])
    if any("{" in part[0] or "}" in part[0] for part in parts if len(part) == 1):
        raise PatternError(pattern, "a brace is not closed, or braces are nested")
    if math.prod(map(len, parts)) > NAME_LIMIT:
        raise PatternError(pattern, f"stands for more than {NAME_LIMIT} names")
    return parts


def _choices(body: str, pattern: str) -> list[str]:
    match = _RANGE.fullmatch(body)
    if match:
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        if first > last or last - first > NAME_LIMIT:
            raise PatternError(pattern, f"the range {{{body}}} is empty or too long")
        return [str(number) for number in range(first, last + 1, step)]
    words = body.split(",")
    if len(words) < 2 or len(set(words)) != len(words):
        raise PatternError(pattern, f"{{{body}}} needs two or more different words")
    return words
