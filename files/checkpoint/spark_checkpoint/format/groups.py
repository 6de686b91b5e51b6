"""Says how a set of names looks to a person: by groups, because there are 100,000 names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from heapq import nsmallest

_NUMBER = re.compile(r"\d+")
_LISTED_NAMES = 10
_LONGEST_NAME = 120


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


def listed(names: Collection[str]) -> str:
    """List the first names of a set exactly, and how many more there are."""
    shown = [
        name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        for name in nsmallest(_LISTED_NAMES, names)
    ]
    if len(names) > _LISTED_NAMES:
        shown.append(f"{len(names) - _LISTED_NAMES} more")
    return ", ".join(shown)
