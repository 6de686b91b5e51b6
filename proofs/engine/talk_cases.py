"""Engine runs of conversations: with the cache of prefixes and without, computed alike."""

from __future__ import annotations

from typing import Any

from proofs.engine.cases import graphs
from proofs.engine.profile_cases import FULL, prefix_cases

EAGER, COMPILED = "agent-plain", "agent-graphs"
TWINS = {"agent-eager": EAGER, "agent-full": COMPILED}
"""Of each engine with the cache the one that computes alike without it."""
CUT = 1088
"""Tokens that a later turn finds in the cache: four blocks of the trained model."""
SHAPES: dict[str, dict[str, Any]] = {
    "agent-alone": {"max_num_seqs": 1},
    "agent-cut": {"max_num_seqs": 1, "max_num_batched_tokens": CUT},
}
"""Eager and without a cache in other steps: one conversation at a time, and its prompt in parts as
the cache makes them."""
TIMES = 6


def again(name: str) -> list[str]:
    return [name, *(f"{name}-{time}" for time in range(2, TIMES + 1))]


def conversation_cases() -> list[dict[str, Any]]:
    """All conversations of ``prefix_cases``, those of the trained model ``TIMES`` times."""
    found = {one["name"]: one for one in prefix_cases()}
    plain = found[EAGER]
    for name, more in {COMPILED: graphs(FULL), **SHAPES}.items():
        found[name] = {**plain, "options": {**plain["options"], **more}}
    steered = [one for name, one in found.items() if name.startswith("prefixes-")]
    talks = [one for one in found if one.startswith("agent-")]
    return [*({**found[name], "name": copy} for name in talks for copy in again(name)), *steered]
