"""Engine runs of conversations: with the cache of prefixes and without, computed alike."""

from __future__ import annotations

from typing import Any

from proofs.engine.cases import graphs
from proofs.engine.profile_cases import FULL, prefix_cases

EAGER, COMPILED = "agent-plain", "agent-graphs"
TWINS = {"agent-eager": EAGER, "agent-full": COMPILED}
"""Of each engine with the cache the one that computes alike without it."""
TIMES = 3


def again(name: str) -> list[str]:
    """Return the names of the engines that do the same."""
    return [name, *(f"{name}-{time}" for time in range(2, TIMES + 1))]


def conversation_cases() -> list[dict[str, Any]]:
    """All conversations of ``prefix_cases``, those of the trained model ``TIMES`` times."""
    found = {one["name"]: one for one in prefix_cases()}
    plain = found[EAGER]
    found[COMPILED] = {**plain, "name": COMPILED, "options": {**plain["options"], **graphs(FULL)}}
    talks = [
        {**found[name], "name": copy}
        for twins in TWINS.items()
        for name in twins
        for copy in again(name)
    ]
    return [*talks, *(one for one in found.values() if one["name"].startswith("prefixes-"))]
