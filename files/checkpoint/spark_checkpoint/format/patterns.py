"""Expands shell braces into exact sets of tensor names, and says how two sets differ.

``layers.{0..2}.{gate,up}_proj`` gives six names. Ranges take a step (``{0..47..4}``).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from spark_checkpoint.errors import InputRefused

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.(\d+))?")
_NUMBER = re.compile(r"\d+")
NAME_LIMIT = 2_000_000


def expand(pattern: str) -> list[str]:
    """Return every name a pattern stands for, in its own order."""
    return list(each_name(pattern))


def each_name(pattern: str) -> Iterator[str]:
    """Yield every name a pattern stands for, in its own order."""
    parts: list[list[str]] = []
    position, count = 0, 1
    for match in _BRACES.finditer(pattern):
        choices = _choices(match.group(1), pattern)
        count *= len(choices)
        if count > NAME_LIMIT:
            raise _refused(pattern, f"expands to more than {NAME_LIMIT} names")
        parts += [[_literal(pattern[position : match.start()], pattern)], choices]
        position = match.end()
    parts.append([_literal(pattern[position:], pattern)])
    return map("".join, itertools.product(*parts))


def uses_up(names: set[str], patterns: Iterable[str]) -> bool:
    """Whether the patterns give exactly these names, each once; ``names`` is taken apart.

    The set is all the memory this takes: no pattern is ever expanded as a whole.
    """
    for pattern in patterns:
        for name in each_name(pattern):
            if name not in names:
                return False
            names.remove(name)
    return not names


def expand_all(patterns: Sequence[str], where: str) -> set[str]:
    """Return the set all patterns stand for; a name they give twice is refused."""
    names: set[str] = set()
    for pattern in patterns:
        expanded = expand(pattern)
        fresh = set(expanded)
        if len(fresh) != len(expanded) or not names.isdisjoint(fresh):
            raise InputRefused(
                where, f"pattern {pattern!r} gives a name twice", "make the patterns disjoint"
            )
        names |= fresh
    return names


def groups(names: Iterable[str], limit: int = 4) -> str:
    """Name the groups a set of names falls into, largest first: ``288 x a.{N}.b``.

    Numbers count as one group, so 10,000 names make a readable line.
    """
    counted = Counter(_NUMBER.sub("{N}", name) for name in names)
    largest = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{count} x {name}" for name, count in largest[:limit]]
    if len(counted) > limit:
        shown.append(f"{len(counted) - limit} more groups")
    return ", ".join(shown)


def _literal(text: str, pattern: str) -> str:
    if "{" in text or "}" in text:
        raise _refused(pattern, "braces are not closed or nested")
    return text


def _choices(body: str, pattern: str) -> list[str]:
    match = _RANGE.fullmatch(body)
    if match:
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        if last < first or step < 1 or last - first > NAME_LIMIT:
            raise _refused(pattern, f"range {body!r} is empty or too long")
        return [str(number) for number in range(first, last + 1, step)]
    choices = body.split(",")
    if len(choices) < 2 or len(set(choices)) != len(choices):
        raise _refused(pattern, f"choice {body!r} needs two or more different parts")
    return choices


def _refused(pattern: str, what: str) -> InputRefused:
    return InputRefused(f"pattern {pattern!r}", what, "correct the pattern in the plan")
