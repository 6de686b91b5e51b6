"""Judge of conversations with a prefix cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from proofs.engine.profile_cases import COMPILED, EAGER, SHAPES, TWINS, again, conversation_cases
from proofs.judges import talks

Row = dict[str, Any]
KINDS = (*TWINS, *TWINS.values(), *SHAPES)


def answer(*tokens: int) -> Row:
    """Three tokens, with a small margin at the last."""
    return {"tokens": [*tokens], "logprobs": [-0.1] * len(tokens), "margins": [2.0, 2.0, 0.01]}


def engine(*, hits: float, second: int) -> Row:
    """Two conversations of three turns; ``second`` is a token of the last turn."""
    spoken = [[answer(1, 2, 3), answer(4, 5, 6)] for _ in range(2)]
    last = [answer(7, second, 8), answer(4, 5, 6)]
    turns = [
        {
            "answers": answers,
            "before": {"vllm:prefix_cache_hits": hits * turn},
            "counters": {"vllm:prefix_cache_hits": hits * (turn + 1)},
        }
        for turn, answers in enumerate([spoken[1], last])
    ]
    return {"answers": spoken[0], "turns": turns}


@pytest.fixture
def results() -> dict[str, Row]:
    """Compiled and eager code differ in a token, with and without a cache."""
    compiled = ("agent-full", COMPILED)
    return {
        name: engine(hits=4352.0 if kind in TWINS else 0.0, second=11 if kind in compiled else 16)
        for kind in KINDS
        for name in again(kind)
    }


def judged(results: dict[str, Row]) -> dict[str, Row]:
    rows = talks.judge_conversations(results)
    return {row["claim"].partition(":")[0]: row for row in rows}


def test_the_cache_does_not_cause_differences_in_compiled_code(results) -> None:
    rows = judged(results)
    assert all(row["passed"] for row in rows.values())
    others = rows["agent-full"]["numbers"]["others"]
    for kind in (COMPILED, "agent-full"):
        between = others[f"{kind}, {EAGER}"]
        assert (between["pairs"], between["pairs_beyond_a_tie"]) == (36, 36)
        assert between["partings"] == {
            "turn 3, conversation 1, word 2": {"pairs": 36, "largest_margin": 2.0}
        }


@pytest.mark.parametrize("name", [copy for kind in TWINS for copy in again(kind)])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_different_token_of_a_single_engine_fails(results, name: str, turn: int) -> None:
    result = results[name]
    answers = result["answers"] if turn == 0 else result["turns"][turn - 1]["answers"]
    answers[1]["tokens"][1] = 99
    failed = [kind for kind, row in judged(results).items() if not row["passed"]]
    assert failed == [name.partition("-2")[0].rstrip("-3456")]


def test_noise_elsewhere_does_not_excuse_a_different_token(results) -> None:
    kept = results["agent-full"]["turns"][1]["answers"]
    kept[0]["logprobs"] = [-1.9, -1.9, -1.9]
    assert judged(results)["agent-full"]["passed"]
    kept[1]["tokens"][1] = 99
    row = judged(results)["agent-full"]
    assert not row["passed"]
    assert row["numbers"]["largest_change"]["nats"] > 1


def test_ties_may_differ_if_every_answer_is_compared(results) -> None:
    results["agent-eager"]["turns"][0]["answers"][0]["tokens"][2] = 99
    row = judged(results)["agent-eager"]
    assert row["passed"]
    assert row["numbers"]["least_pairs_with_an_answer"] == 30
    for name in again("agent-eager"):
        results[name]["turns"][0]["answers"][0]["tokens"][2] = 99
    row = judged(results)["agent-eager"]
    assert row["numbers"]["least_pairs_with_an_answer"] == 0
    assert not row["passed"]


def test_short_answer_and_turn_without_cache_hits_fail(results) -> None:
    short, unused = copy.deepcopy(results), copy.deepcopy(results)
    for part in ("tokens", "logprobs", "margins"):
        del short["agent-eager"]["turns"][1]["answers"][1][part][1:]
    assert not judged(short)["agent-eager"]["passed"]
    turn = unused["agent-eager-2"]["turns"][1]
    turn["counters"] = turn["before"]
    assert not judged(unused)["agent-eager"]["passed"]


def test_dead_engine_fails_only_its_row(results) -> None:
    results["agent-full-3"] = {"state": "died"}
    rows = judged(results)
    assert [row["passed"] for row in rows.values()] == [True, False]


def test_cached_and_uncached_cases_differ_only_in_the_cache() -> None:
    cases = {case["name"]: case for case in conversation_cases()}
    for kind, twin in TWINS.items():
        for cached, uncached in zip(again(kind), again(twin), strict=True):
            kept, without = copy.deepcopy(cases[cached]), cases[uncached]
            assert kept["options"].pop("enable_prefix_caching") is True
            assert {**kept, "name": uncached} == without


def test_every_kind_runs_and_the_steered_model_once() -> None:
    names = [case["name"] for case in conversation_cases()]
    steered = ["prefixes-plain", "prefixes-eager", "prefixes-full"]
    assert sorted(names) == sorted([copy for kind in KINDS for copy in again(kind)] + steered)
