"""Conversations with a cache are judged by engines that compute alike without one."""

from __future__ import annotations

from typing import Any

import pytest

from proofs.engine import talk_cases
from proofs.engine.talk_cases import COMPILED, EAGER, TWINS, again
from proofs.judges import talks

Row = dict[str, Any]
TOLD = {"tokens_found_per_turn": [4352.0, 4352.0]}


def judge(results: dict[str, Row]) -> list[Row]:
    """As ``profiles.judge_prefixes``: each role against ``agent-plain``, by what each says."""
    rows = []
    for role in TWINS:
        beyond = int(results[role]["says"] != results[EAGER]["says"])
        turn = {
            "beyond_margin": beyond,
            "diverged": beyond,
            "margins_there": [0.8] * beyond,
            "largest_noise": 0.1,
        }
        numbers = {**TOLD, "turns": [turn]}
        rows.append({"claim": f"{role}: alike", "passed": not beyond, "numbers": numbers})
    return [*rows, {"claim": "prefixes-eager: equal", "passed": True, "numbers": {}}]


@pytest.fixture
def results() -> dict[str, Row]:
    """Compiled code says another word than eager code, whether there is a cache or not."""
    eager = {name: {"says": "sixteen"} for name in (*again("agent-eager"), *again(EAGER))}
    compiled = {name: {"says": "eleven"} for name in (*again("agent-full"), *again(COMPILED))}
    return {**eager, **compiled}


def test_what_compiled_code_says_without_a_cache_is_no_fault_of_the_cache(results) -> None:
    rows = talks.judge_conversations(judge, results)
    assert [row["claim"].partition(":")[0] for row in rows] == [*TWINS, "prefixes-eager"]
    assert all(row["passed"] for row in rows)
    eager, full, _ = rows
    assert talks.COMPARED not in eager["numbers"]
    between = full["numbers"][talks.COMPARED]
    assert (between["pairs"], between["pairs_beyond_ties"]) == (9, 9)


@pytest.mark.parametrize("name", [copy for name in TWINS for copy in again(name)])
def test_another_word_of_a_single_engine_with_a_cache_fails(results, name: str) -> None:
    results[name] = {"says": "nothing"}
    rows = talks.judge_conversations(judge, results)
    failed = [row["claim"].partition(":")[0] for row in rows if not row["passed"]]
    assert failed == [name.removesuffix("-2").removesuffix("-3")]


def test_a_failed_row_names_all_engines_whose_answers_it_keeps(results) -> None:
    _, full, _ = talks.judge_conversations(judge, results)
    assert full["cases"] == [*again("agent-full"), *again(COMPILED)]


def test_twins_differ_in_the_cache_alone() -> None:
    cases = {case["name"]: case for case in talk_cases.conversation_cases()}
    for name, twin in TWINS.items():
        for one in again(name):
            for other in again(twin):
                options = {**cases[one]["options"]}
                assert options.pop("enable_prefix_caching") is True
                assert options == cases[other]["options"]
                named = ("name", "options")
                assert {k: v for k, v in cases[one].items() if k not in named} == {
                    k: v for k, v in cases[other].items() if k not in named
                }
    assert [name for name in cases if name.startswith("prefixes-")] == [
        "prefixes-plain",
        "prefixes-eager",
        "prefixes-full",
    ]
