"""Says how a set of names looks to a person: by groups, because there are 100,000 names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_NUMBER = re.compile(r"\d+")


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
