from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product, zip_longest
from typing import Any, NamedTuple

from proofs.engine.profile_cases import COMPILED, EAGER, SHAPES, TWINS, reruns
from proofs.judges.answers import Row, attempt, cache_hits, change, row

Results = dict[str, Row]
Pair = tuple[str, str]
TIE = 0.0625
"""Nats between two equally good tokens: two steps of a BF16 logit of 4 to 8."""


class Word(NamedTuple):
    """A token that two engines generated after the same prefix; indices are zero-based."""

    turn: int
    talk: int
    place: int
    change: float  # nats between the log-probabilities; 0 for different tokens
    margin: float | None


def judge_conversations(results: Results) -> list[Row]:
    """Judge every engine with a cache against every run of the same engine without.

    After filler that the model never saw, two equal starts differ by up to half a nat, and compiled
    code from eager code. So tokens may differ only in a tie, or at the words at which two starts of
    the engine without a cache differ, and no more often; and a pair must compare each answer.
    """
    return [attempt(name, _judge_against_twins, results, name) for name in TWINS]


def _judge_against_twins(results: Results, name: str) -> Row:
    twin = TWINS[name]
    pairs = list(product(reruns(name), reruns(twin)))
    differences = _find_differences(results, pairs)
    hits = [cache_hits(turn) for engine in reruns(name) for turn in results[engine]["turns"]]
    controls: dict[str, list[Pair]] = {
        f"{name}, started again": list(combinations(reruns(name), 2)),
        f"{twin}, started again": list(combinations(reruns(twin), 2)),
    }
    if twin == COMPILED:
        for engine in (COMPILED, name):
            controls[f"{engine}, {EAGER}"] = list(product(reruns(engine), reruns(EAGER)))
    else:
        controls |= {f"{shape}, {EAGER}": list(product([shape], reruns(EAGER))) for shape in SHAPES}
    others = {words: _find_differences(results, group) for words, group in controls.items()}
    noise = others[f"{twin}, started again"]
    good = (
        _share_beyond_a_tie(differences) <= _share_beyond_a_tie(noise)
        and _words_beyond_a_tie(differences) <= _words_beyond_a_tie(noise)
        and differences["least_pairs_with_an_answer"]
        and min(hits) > 0
    )
    return row(
        f"{name}: later turns hit the cache, and answers differ from those of {twin} without it"
        f" only in ties or as two starts of {twin} do",
        bool(good),
        [*reruns(name), *reruns(twin), *(SHAPES if twin == EAGER else ())],
        tie=TIE,
        tokens_found_in_a_turn=sorted(set(hits)),
        **differences,
        others=others,
    )


def _share_beyond_a_tie(differences: dict[str, Any]) -> float:
    return float(differences["pairs_beyond_a_tie"] / differences["pairs"])


def _words_beyond_a_tie(differences: dict[str, Any]) -> set[str]:
    partings = differences["partings"].items()
    return {word for word, parted in partings if parted["largest_margin"] > TIE}


def _find_differences(results: Results, pairs: list[Pair]) -> dict[str, Any]:
    compared: Counter[tuple[int, int]] = Counter()
    partings: dict[str, list[float]] = {}
    beyond, largest = 0, (0.0, "nowhere")
    for first, second in pairs:
        words = list(compare_words(results[first], results[second]))
        compared.update({(word.turn, word.talk) for word in words})
        parted = [word for word in words if word.margin is not None]
        beyond += any(word.margin > TIE for word in parted)
        for word in parted:
            partings.setdefault(_describe_position(word), []).append(round(word.margin, 4))
        largest = max(
            largest, *((round(word.change, 4), _describe_position(word)) for word in words)
        )
    answers = product(
        range(1 + len(results[EAGER]["turns"])), range(len(results[EAGER]["answers"]))
    )
    return {
        "pairs": len(pairs),
        "pairs_beyond_a_tie": beyond,
        "least_pairs_with_an_answer": min(compared[first] for first in answers),
        "partings": {
            place: {"pairs": len(margins), "largest_margin": max(margins)}
            for place, margins in sorted(partings.items())
        },
        "largest_change": {"nats": largest[0], "place": largest[1]},
    }


def compare_words(first_run: Row, second_run: Row) -> Iterator[Word]:
    first_turns, second_turns = _list_turns(first_run), _list_turns(second_run)
    for talk in range(len(first_turns[0])):
        for turn, (first, second) in enumerate(zip(first_turns, second_turns, strict=True)):
            x, y = first[talk], second[talk]
            for place, (a, b) in enumerate(zip_longest(x["tokens"], y["tokens"])):
                if a != b:
                    margin = min(
                        answer["margins"][place]
                        for answer in (x, y)
                        if place < len(answer["tokens"])
                    )
                    yield Word(turn, talk, place, 0.0, margin)
                    break
                moved = change(x["logprobs"][place], y["logprobs"][place])
                yield Word(turn, talk, place, moved, None)
            if x["tokens"] != y["tokens"]:
                break  # the next prompts differ


def _list_turns(result: Row) -> list[list[Row]]:
    return [result["answers"], *(turn["answers"] for turn in result["turns"])]


def _describe_position(word: Word) -> str:
    return f"turn {word.turn + 1}, conversation {word.talk + 1}, word {word.place + 1}"
