"""Judges conversations with a cache by those of the engines that compute alike without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product, zip_longest
from typing import Any, NamedTuple

from proofs.engine.profile_cases import COMPILED, EAGER, SHAPES, TWINS, again
from proofs.judges.answers import Row, attempt, row

Results = dict[str, Row]
Pair = tuple[str, str]
TIE = 0.0625
"""Nats between two words of which either may be chosen: two steps of a BF16 logit of 4 to 8."""


class Word(NamedTuple):
    """One word that two engines said after the same words; turns and places count from 0."""

    turn: int
    talk: int
    place: int
    change: float  # nats between its log-probabilities; of two words nothing: 0
    margin: float | None  # where they part: nats by which the less sure engine chose its word


def judge_conversations(results: Results) -> list[Row]:
    """Judge every engine with a cache against every one that computes alike without.

    The trained model stands behind filler that it never saw: at some words engines that are
    started twice with the same arguments differ by half a nat, and compiled code says another word
    than eager code, with a cache and without. So no noise is an excuse: a word may be another one
    only where the two were a tie, and each answer is compared in at least one pair.
    """
    return [attempt(name, lambda n=name: _against_twins(results, n)) for name in TWINS]


def _against_twins(results: Results, name: str) -> Row:
    twin = TWINS[name]
    pairs = list(product(again(name), again(twin)))
    told = _told(results, pairs)
    hits = [_hits(turn) for one in again(name) for turn in results[one]["turns"]]
    good = not told["pairs_beyond_a_tie"] and told["least_pairs_with_an_answer"] and min(hits) > 0
    beside: dict[str, list[Pair]] = {
        f"{name}, started again": list(combinations(again(name), 2)),
        f"{twin}, started again": list(combinations(again(twin), 2)),
    }
    if twin == COMPILED:
        for one in (COMPILED, name):
            beside[f"{one}, {EAGER}"] = list(product(again(one), again(EAGER)))
    else:
        beside |= {
            f"{shape}, {EAGER}": list(product(again(shape), again(EAGER))) for shape in SHAPES
        }
    return row(
        f"{name}: later turns are found in the cache, and answered as by {twin} without it"
        f" outside ties, each of {len(again(name))} by each of {len(again(twin))}",
        bool(good),
        [*again(name), *again(twin)],
        tie=TIE,
        tokens_found_in_a_turn=sorted(set(hits)),
        **told,
        others={words: _told(results, ones) for words, ones in beside.items()},
    )


def _told(results: Results, pairs: list[Pair]) -> dict[str, Any]:
    """Return where the engines of ``pairs`` part, and by how much a word's probability moves."""
    compared: Counter[tuple[int, int]] = Counter()
    partings: dict[str, list[float]] = {}
    beyond, largest = 0, (0.0, "nowhere")
    for one, other in pairs:
        words = list(_compare(results[one], results[other]))
        compared.update({(word.turn, word.talk) for word in words})
        parted = [word for word in words if word.margin is not None]
        beyond += any(word.margin > TIE for word in parted)
        for word in parted:
            partings.setdefault(_place(word), []).append(round(word.margin, 4))
        largest = max(largest, *((round(word.change, 4), _place(word)) for word in words))
    asked = product(range(1 + len(results[EAGER]["turns"])), range(len(results[EAGER]["answers"])))
    return {
        "pairs": len(pairs),
        "pairs_beyond_a_tie": beyond,
        "least_pairs_with_an_answer": min(compared[one] for one in asked),
        "partings": {
            place: {"pairs": len(found), "largest_margin": max(found)}
            for place, found in sorted(partings.items())
        },
        "largest_change": {"nats": largest[0], "place": largest[1]},
    }


def _compare(one: Row, other: Row) -> Iterator[Word]:
    """Yield every word that both engines say after the same ones, and where they part."""
    mine, theirs = _turns(one), _turns(other)
    for talk in range(len(mine[0])):
        for turn, (first, second) in enumerate(zip(mine, theirs, strict=True)):
            x, y = first[talk], second[talk]
            for place, (a, b) in enumerate(zip_longest(x["tokens"], y["tokens"])):
                if a != b:
                    margin = min(
                        told["margins"][place] for told in (x, y) if place < len(told["tokens"])
                    )
                    yield Word(turn, talk, place, 0.0, margin)
                    break
                change = abs(x["logprobs"][place] - y["logprobs"][place])
                yield Word(turn, talk, place, change, None)
            if x["tokens"] != y["tokens"]:
                break  # what is asked next is another prompt


def _turns(result: Row) -> list[list[Row]]:
    return [result["answers"], *(turn["answers"] for turn in result["turns"])]


def _hits(turn: Row) -> float:
    found = [
        value - turn["before"].get(key, 0)
        for key, value in turn["counters"].items()
        if key.endswith("prefix_cache_hits")
    ]
    return float(sum(found))


def _place(word: Word) -> str:
    return f"turn {word.turn + 1}, conversation {word.talk + 1}, word {word.place + 1}"
