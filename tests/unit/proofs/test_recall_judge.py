"""The judges of the recall proofs fail what they are there to find."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from proofs.recall import judge, verdicts

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
LENGTH = 1000


def answers(lost: tuple[float, float] = (2, 2), registers_right: bool = True) -> list[judge.Row]:
    """Twenty things to look up, evenly deep, and four registers; ``lost``: depths not found."""
    rows = []
    for number in range(24):
        kind = "register" if number >= 20 else "record"
        depth = 1.0 if kind == "register" else number / 20
        right = registers_right if kind == "register" else not lost[0] <= depth < lost[1]
        rows.append(
            {
                "kind": kind,
                "length": LENGTH,
                "depth": depth,
                "right": right,
                "tokens": [1, 2],
                "logprobs": [-0.1, -0.2],
                "steps": [{"1": -0.1, "5": -3.0}, {"2": -0.2, "5": -2.5}],
            }
        )
    return rows


def run(rows: list[judge.Row], **case: Any) -> dict[str, Any]:
    return {"state": "ran", "case": {"options": {}, **case}, "recall": rows}


def verdict(results: dict[str, Any]) -> list[bool | None]:
    return [row["passed"] for row in verdicts.judge_recall(results, run(answers()))]


def test_a_model_that_finds_everything_passes_and_one_that_misses_a_twentieth_fails() -> None:
    assert verdict({"recall-16bit": run(answers())}) == [True]
    assert verdict({"recall-16bit": run(answers(lost=(0.5, 0.55)))}) == [False]


def test_an_engine_that_answered_nothing_is_no_pass() -> None:
    assert verdicts.judge_turboquant({"tq": {"state": "died", "case": {}}}, run(answers()))[0][
        "passed"
    ] is False  # fmt: skip
    died = {"talk-cache": {"state": "died", "case": {"options": {}}}}
    assert [row["passed"] for row in verdicts.judge_prefixes(died, {})] == [False]


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        (answers(lost=(0.25, 0.5)), True),
        (answers(), False),  # the damage was not seen
        (answers(lost=(0.0, 1.0)), False),  # something else is lost as well
    ],
)
def test_a_band_taken_out_must_be_lost_and_nothing_else(
    rows: list[judge.Row], passed: bool
) -> None:
    assert verdict({"damage-band": run(rows, damage={"band": [250, 500]})}) == [passed]


def test_states_taken_away_must_cost_registers() -> None:
    damage = {"damage": {"states": []}}
    assert verdict({"damage-states": run(answers(registers_right=False), **damage)}) == [True]
    assert verdict({"damage-states": run(answers(), **damage)}) == [False]


def test_depth_is_told_by_quarters() -> None:
    assert judge.by_depth(answers(lost=(0.5, 0.75))) == [1.0, 1.0, 0.0, 1.0]


def test_divergence_is_none_for_the_same_and_grows_with_the_difference() -> None:
    one = {"1": -0.1, "2": -3.0}
    assert judge.divergence(one, one) == pytest.approx(0, abs=1e-9)
    near = judge.divergence(one, {"1": -0.12, "2": -2.8})
    far = judge.divergence(one, {"1": -1.0, "2": -0.6})
    assert 0 < near < far


def test_steps_behind_different_tokens_are_not_compared() -> None:
    one, two = answers(), answers()
    two[0]["tokens"] = [9, 2]
    assert judge.divergences(one, one)["later"]["steps"] == 24
    assert judge.divergences(one, two)["later"]["steps"] == 23


def talk(**more: Any) -> dict[str, Any]:
    rows = [
        {
            "round": number // 3,
            "place": number % 3,
            "client": f"client{number % 3}",
            "kind": "record",
            "length": 100 + number,
            "prompt": str(number % 6),
            "right": True,
            "tokens": [number % 6, 1],
            "hits_so_far": 50 * number,
        }
        for number in range(9)
    ]
    return {"state": "ran", "case": {"options": {}}, "talks": rows, **more}


def judged(name: str, result: dict[str, Any]) -> dict[str, Any]:
    plain = talk()
    for row in plain["talks"]:
        row["hits_so_far"] = 0
    rows = verdicts.judge_prefixes({"talk-plain": plain, name: result}, {})
    return {row["cases"][0]: row for row in rows}[name]


CACHING = {"case": {"options": {"enable_prefix_caching": True}}}


def test_the_same_answers_with_a_cache_that_was_used_pass() -> None:
    assert judged("talk-cache", talk(**CACHING))["passed"] is True


def test_a_cache_that_was_never_used_proves_nothing() -> None:
    unused = talk(**CACHING)
    for row in unused["talks"]:
        row["hits_so_far"] = 0
    assert judged("talk-cache", unused)["passed"] is False


def test_one_wrong_answer_fails_and_so_does_one_other_token_and_a_repeat_that_differs() -> None:
    wrong, other = talk(**CACHING), talk(**CACHING)
    wrong["talks"][4]["right"] = False
    other["talks"][7]["tokens"] = [1, 2]
    assert judged("talk-cache", wrong)["passed"] is False
    found = judged("talk-cache", other)
    assert found["passed"] is False
    assert found["numbers"]["other_than_plain"] == 1
    assert found["numbers"]["repeats_differ"] == 1


def test_damage_that_nobody_sees_is_a_failure_of_the_judge() -> None:
    assert judged("talk-damage-carry", talk(**CACHING))["passed"] is False
    damaged = talk(**CACHING)
    damaged["talks"][2]["right"] = False
    assert judged("talk-damage-carry", damaged)["passed"] is True


def committed(name: str) -> list[judge.Row]:
    found: list[judge.Row] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


@pytest.mark.parametrize("name", ["gpu/recall-recall", "gpu/recall-prefixes", "cpu/recall-formats"])
def test_committed_rows_hold_and_name_a_damage_that_was_seen(name: str) -> None:
    rows = committed(name)
    assert [row["claim"] for row in rows if row["passed"] is False] == []
    damaged = [row for row in rows if row["claim"].startswith(("damage", "noise"))]
    assert name == "gpu/recall-prefixes" or any(row["passed"] for row in damaged)


def test_the_committed_model_finds_what_damage_takes_away() -> None:
    rows = {row["cases"][0]: row["numbers"] for row in committed("gpu/recall-recall")}
    whole = rows["recall-16bit"]["right"]
    assert all(share["record"] == 1.0 for share in whole.values())
    assert rows["damage-band"]["inside"]["right"] < 0.1 < rows["damage-band"]["outside"]["right"]
    worse = copy.deepcopy(rows["damage-noise-100"]["right"])
    assert worse["131072"]["record"] < 0.5
