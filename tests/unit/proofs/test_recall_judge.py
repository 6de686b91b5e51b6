import json
from typing import Any

import pytest

from proofs.recall import verdicts
from spark_deploy.config.checkout import CHECKOUT

LENGTH = 1000
Result = dict[str, Any]


def answers(lost=(2, 2), registers_right=True):
    """Twenty records, evenly deep, and four registers; ``lost``: range of depths not found."""
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


LOST_RECORD = answers(lost=(0.5, 0.55))


def run(rows, **case):
    return {"state": "ran", "case": {"options": {}, **case}, "recall": rows}


def verdict(name, result, reference=None):
    [row] = verdicts.judge_recall({name: result}, run(reference or answers()))
    return row["passed"]


@pytest.mark.parametrize(
    ("name", "rows", "passed"),
    [
        ("recall-16bit", answers(), True),
        ("recall-16bit", answers(lost=(0.5, 0.65)), False),
        ("tq", answers(), True),
        ("tq", LOST_RECORD, False),
    ],
)
def test_model_and_engine_must_find_records(name, rows, passed):
    assert verdict(name, run(rows)) is passed


@pytest.mark.parametrize(
    ("name", "damage", "rows", "passed"),
    [
        ("damage-band", {"band": [250, 500]}, answers(lost=(0.25, 0.5)), True),
        ("damage-band", {"band": [250, 500]}, answers(), False),
        ("damage-band", {"band": [250, 500]}, answers(lost=(0.0, 1.0)), False),
        ("damage-states", {"states": []}, answers(registers_right=False), True),
        ("damage-states", {"states": []}, answers(), False),
    ],
    ids=["band lost", "no effect", "more than the band lost", "registers lost", "states: none"],
)
def test_damage_must_lose_exactly_the_damaged_part(name, damage, rows, passed):
    assert verdict(name, run(rows, damage=damage)) is passed


def talk(*, hits=50, caching=True, **changed_row):
    """Three clients with three rounds; ``changed_row`` replaces fields of the fifth answer."""
    rows: list[Result] = [
        {
            "round": number // 3,
            "place": number % 3,
            "client": f"client{number % 3}",
            "kind": "record",
            "length": 100 + number,
            "prompt": str(number % 6),
            "right": True,
            "tokens": [number % 6, 1],
            "logprobs": [-0.001, -0.002],
            "hits_so_far": hits * number,
        }
        for number in range(9)
    ]
    rows[4] |= changed_row
    options = {"enable_prefix_caching": True} if caching else {}
    return {"state": "ran", "case": {"options": options}, "talks": rows}


PLAIN = talk(hits=0, caching=False)


def judged(name, result, plain=PLAIN):
    rows = verdicts.judge_prefixes({"talk-plain": plain, name: result}, {})
    return {row["cases"][0]: row for row in rows}[name]


@pytest.mark.parametrize(
    ("result", "passed"),
    [
        (talk(), True),
        (talk(hits=0), False),
        (talk(right=False), False),
        (talk(tokens=[1, 2]), False),
        (talk(prompt="another"), False),
    ],
    ids=["equal answers", "no cache hits", "wrong answer", "different token", "no reference"],
)
def test_cache_must_be_used_without_changing_answers(result, passed):
    assert judged("talk-cache", result)["passed"] is passed


DAMAGED = {
    "recall-recall": 3,
    "recall-prefixes": 3,
    "recall-drafts": 1,
    "recall-flashinfer": 2,
    "recall-turboquant": 0,  # damaged engines are in recall-recall
    "recall-wide": 0,
}
"""Number of damaged engines that failed, by result file."""


@pytest.mark.parametrize("name", DAMAGED)
def test_recorded_rows_pass_and_detect_damage(name):
    path = CHECKOUT / f"proofs/results/gpu/{name}.json"
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert [row["claim"] for row in rows if row["passed"] is False] == []
    words = ("damage", "noise", "fi-gdn-states")
    damaged = [row for row in rows if row["passed"] and any(word in row["claim"] for word in words)]
    assert len(damaged) == DAMAGED[name]
