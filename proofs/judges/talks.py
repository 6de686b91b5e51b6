"""Judges conversations with a cache by those of the engines that compute alike without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from proofs.engine.talk_cases import COMPILED, EAGER, TWINS, again
from proofs.judges.rows import Row

Results = dict[str, Row]
Judge = Callable[[Results], list[Row]]
COMPARED = "without_a_cache_compiled_against_eager"


def judge_conversations(judge: Judge, results: Results) -> list[Row]:
    """Judge every engine with a cache against every twin without; of steered ones as ``judge``.

    The trained model stands behind filler that it never saw, where compiled code rounds to another
    word than eager code does, with a cache and without: only twins tell what the cache changes.

    Args:
        judge: ``profiles.judge_prefixes``, which compares with ``agent-plain``.
        results: of all engines of ``talk_cases``.
    """
    steered = [row for row in judge(results) if not row["claim"].startswith("agent-")]
    return [*(_against_twins(judge, results, name) for name in TWINS), *steered]


def _against_twins(judge: Judge, results: Results, name: str) -> Row:
    twin = TWINS[name]
    pairs = list(_pairs(judge, results, name, twin))
    parts = pairs[:: len(again(twin))]
    numbers = {
        **_told(pairs),
        "tokens_found_per_turn": [one["numbers"].get("tokens_found_per_turn") for one in parts],
    }
    if twin == COMPILED:
        numbers[COMPARED] = _told(list(_pairs(judge, results, COMPILED, EAGER)))
    return {
        "claim": f"{name}: later turns are found in the cache, and answered as by {twin} without it"
        " outside ties, each of three by each of three",
        "passed": all(pair["passed"] for pair in pairs),
        "cases": [*again(name), *again(twin)],
        "numbers": numbers,
    }


def _pairs(judge: Judge, results: Results, name: str, twin: str) -> Iterator[Row]:
    """Yield the rows of each engine called so against each twin."""
    role = name if name in TWINS else next(iter(TWINS))
    for one in again(name):
        for other in again(twin):
            rows = judge({**results, role: results[one], EAGER: results[other]})
            yield next(row for row in rows if row["claim"].partition(":")[0] == role)


def _told(pairs: list[Row]) -> Row:
    turns = [turn for pair in pairs for turn in pair["numbers"].get("turns", [])]
    beyond = [
        any(turn["beyond_margin"] for turn in pair["numbers"].get("turns", [])) for pair in pairs
    ]
    return {
        "pairs": len(pairs),
        "pairs_beyond_ties": sum(beyond),
        "conversations_that_part": sum(turn["diverged"] for turn in turns),
        "margins_there": sorted({margin for turn in turns for margin in turn["margins_there"]}),
        "largest_noise": max((turn["largest_noise"] for turn in turns), default=None),
    }
