"""The judge of conversations with prefix caching and drafts."""

import math

import pytest

from proofs.recall.judge import judge_answer, unlikely_steps
from proofs.recall.verdicts import judge_talks

WANTED = [7, 274]
SURE = {"274": -0.01, "275": -7.0}
TIED = {"274": -1.52, "275": -1.52, "85": -2.2}
NEARLY = {"275": -1.51, "274": -1.57, "85": -2.2}
FLAT = {"275": -1.2, "274": -1.57, "85": -2.2}


def turn(token, step, number=0, first=7):
    answer = {"tokens": [first, token], "steps": [{str(first): -0.01, "9": -8.0}, step]}
    row = judge_answer(answer, WANTED)
    if unlikely := unlikely_steps(answer):
        row["unlikely"] = unlikely
    about = {"round": number, "place": 0, "client": "a", "kind": "register", "prompt": "0"}
    return {**about, "length": 32, "hits_so_far": 272, **row}


def judged(*answers, plain, damage=""):
    name = f"talk-{damage}mtp2"
    caching, drafts = {"enable_prefix_caching": True}, {"enable_prefix_caching": False}
    results = {
        "talk-plain": {"talks": plain, "case": {"options": drafts}},
        name: {"talks": list(answers), "case": {"options": caching}},
    }
    [row] = [row for row in judge_talks(results, "talk-plain") if row["cases"][0] == name]
    return row["passed"], row["numbers"]["ties"]


@pytest.mark.parametrize(
    ("own", "plain", "passed"),
    [
        ((274, SURE), (274, SURE), True),
        ((275, NEARLY), (274, TIED), True),
        ((275, NEARLY), (274, SURE), False),  # a tie only with prefix caching and drafts
        ((275, FLAT), (274, TIED), False),
        ((85, {"85": -1.5, **NEARLY}), (274, TIED), False),  # a tie between other tokens
        ((85, NEARLY), (274, TIED), False),  # not the most likely token
        ((275, {"275": math.nan, "274": math.nan}), (274, TIED), False),
    ],
)
def test_answer_may_differ_only_where_both_engines_are_undecided(own, plain, passed):
    assert judged(turn(*own), plain=[turn(*plain)])[0] is passed


def test_excused_difference_is_reported_with_its_tokens_and_gaps():
    _, ties = judged(turn(275, NEARLY), plain=[turn(274, TIED)])
    [tie] = ties
    assert (tie["place"], tie["tokens"], tie["gaps"]) == (1, [275, 274], [0.06, 0.0])


def test_one_tie_does_not_excuse_another_difference():
    tied, wrong = turn(275, NEARLY), turn(275, {"275": -0.01, "274": -7.0}, number=1)
    assert judged(tied, wrong, plain=[turn(274, TIED), turn(274, SURE, number=1)])[0] is False


def test_answer_without_a_counterpart_fails():
    assert judged(turn(274, SURE), plain=[turn(274, SURE, number=1)])[0] is False


@pytest.mark.parametrize(("own", "detected"), [((275, NEARLY), False), ((275, FLAT), True)])
def test_damaged_engine_must_differ_outside_ties(own, detected):
    assert judged(turn(*own), plain=[turn(274, TIED)], damage="damage-")[0] is detected
