"""The judges of the recall proofs detect wrong answers and damage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proofs.recall import judge, verdicts
from spark_deploy.config.checkout import CHECKOUT

LENGTH = 1000
Result = dict[str, Any]


def answers(lost: tuple[float, float] = (2, 2), registers_right: bool = True) -> list[judge.Row]:
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


def run(rows: list[judge.Row], **case: Any) -> Result:
    return {"state": "ran", "case": {"options": {}, **case}, "recall": rows}


def verdict(name: str, result: Result, reference: list[judge.Row] | None = None) -> bool | None:
    [row] = verdicts.judge_recall({name: result}, run(reference or answers()))
    passed: bool | None = row["passed"]
    return passed


def verdicts_by_engine(rows: list[judge.Row]) -> dict[str, bool | None]:
    return {row["cases"][0]: row["passed"] for row in rows}


@pytest.mark.parametrize(
    ("name", "rows", "passed"),
    [
        ("recall-16bit", answers(), True),
        ("recall-16bit", answers(lost=(0.5, 0.65)), False),
        ("tq", answers(), True),
        ("tq", LOST_RECORD, False),
    ],
)
def test_model_and_engine_must_find_records(name: str, rows: list[judge.Row], passed: bool) -> None:
    assert verdict(name, run(rows)) is passed


def test_unreliable_model_answers_are_ignored() -> None:
    doubtful = answers()
    doubtful[10]["logprobs"] = [-0.1, -0.8]
    for reference in (LOST_RECORD, doubtful):
        [row] = verdicts.judge_recall({"tq": run(LOST_RECORD)}, run(reference))
        assert row["passed"]
        assert row["numbers"]["found"]["sure_in_16bit"] == 19
    assert verdict("tq", run(answers(lost=(0.3, 0.35))), LOST_RECORD) is False


def test_engine_without_answers_fails() -> None:
    died = {"state": "died", "case": {"options": {}}}
    [turboquant] = verdicts.judge_turboquant({"tq": died}, run(answers()))
    [talk_row] = verdicts.judge_prefixes({"talk-cache": died}, {})
    assert turboquant["passed"] is talk_row["passed"] is False


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
def test_damage_must_lose_exactly_the_damaged_part(
    name: str, damage: Result, rows: list[judge.Row], passed: bool
) -> None:
    assert verdict(name, run(rows, damage=damage)) is passed


def test_divergence_grows_with_the_difference() -> None:
    reference = {"1": -0.1, "2": -3.0}
    assert judge.divergence(reference, reference) == pytest.approx(0, abs=1e-9)
    near = judge.divergence(reference, {"1": -0.12, "2": -2.8})
    far = judge.divergence(reference, {"1": -1.0, "2": -0.6})
    assert 0 < near < far


def test_steps_after_different_tokens_are_not_compared() -> None:
    computed = answers()
    computed[0]["tokens"] = [9, 2]
    assert judge.divergences(answers(), answers())["later"]["steps"] == 24
    assert judge.divergences(answers(), computed)["later"]["steps"] == 23


def talk(*, hits: int = 50, caching: bool = True, **changed_row: Any) -> Result:
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


def judged(name: str, result: Result, plain: Result = PLAIN) -> Result:
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
def test_cache_must_be_used_without_changing_answers(result: Result, passed: bool) -> None:
    assert judged("talk-cache", result)["passed"] is passed


def test_different_token_is_counted() -> None:
    different = talk()
    different["talks"][7]["tokens"] = [1, 2]
    numbers = judged("talk-cache", different)["numbers"]
    assert (numbers["other_than_plain"], numbers["repeats_differ"]) == (1, 1)


def test_undetected_damage_fails() -> None:
    assert judged("talk-damage-carry", talk())["passed"] is False
    assert judged("talk-damage-carry", talk(right=False))["passed"] is True


@pytest.mark.parametrize(("logprob", "passed"), [(-0.92, True), (-1.2, False), (-5.0, False)])
def test_different_answer_is_allowed_only_in_doubt(logprob: float, passed: bool) -> None:
    doubtful = {"right": False, "tokens": [4, 9], "logprobs": [-0.001, logprob]}
    assert judged("talk-cache", talk(**doubtful))["passed"] is passed
    damaged = talk(caching=False, **doubtful)
    assert judged("talk-damage-carry", damaged)["passed"] is not passed


def test_answer_that_is_wrong_in_the_reference_too_passes() -> None:
    wrong = {"right": False, "tokens": [4, 9], "logprobs": [-0.001, -5.0]}
    plain = talk(hits=0, caching=False, **wrong)
    assert judged("talk-plain", plain, plain)["passed"] is False  # 8 of 9 right: too few
    assert judged("talk-cache", talk(**wrong), plain)["passed"] is True


def test_concurrent_answers_must_equal_sequential_answers() -> None:
    moved = answers()
    moved[3]["tokens"] = [7, 7]
    concurrent = {
        "wide-tq-k8v4": run(answers()),
        "wide-tq-k8v4-alone": run(answers()),
        "wide-16bit": run(answers()),
    }
    assert verdicts_by_engine(verdicts.judge_wide(concurrent, {})) == {
        "wide-tq-k8v4": True,
        "wide-tq-k8v4-alone": None,
        "wide-16bit": None,
    }
    for failed in (run(moved), {"state": "died", "case": {}}):
        rows = verdicts.judge_wide({**concurrent, "wide-tq-k8v4": failed}, {})
        assert rows[0]["passed"] is False


OTHER_TOKEN = answers()
OTHER_TOKEN[0]["tokens"] = [5, 5]


@pytest.mark.parametrize(
    ("name", "accepted", "rows", "passed"),
    [
        ("drafts-int4-mtp2", 70, answers(), True),
        ("drafts-int4-mtp2", 70, OTHER_TOKEN, False),
        ("drafts-damage", 3, answers(), True),
        ("drafts-damage", 70, answers(), False),
    ],
)
def test_drafts_do_not_change_answers_and_a_broken_drafter_is_detected(
    name: str, accepted: int, rows: list[judge.Row], passed: bool
) -> None:
    counters = {"x:num_draft_tokens": 100, "x:num_accepted_tokens": accepted}
    drafting = {**run(rows), "counters": counters}
    judged_rows = verdicts.judge_drafts({"drafts-none": run(answers()), name: drafting}, {})
    assert verdicts_by_engine(judged_rows)[name] is passed


FLASHINFER = {"attention_config": {"backend": "FLASHINFER"}}


@pytest.mark.parametrize(
    "case",
    [
        {"options": {**FLASHINFER, "async_scheduling": False}},
        {"options": {**FLASHINFER, "speculative_config": {}}},
        {"options": FLASHINFER, "environment": {"CUDA_LAUNCH_BLOCKING": "1"}},
        {"options": {}},
    ],
)
def test_synchronous_engine_must_not_crash_or_lose_answers(case: Result) -> None:
    broken = {"state": "refused", "error": ["CUDA error: an illegal memory access"], "case": case}
    assert verdicts.judge_flashinfer({"fi-x": broken}, {})[0]["passed"] is False
    lost = run(LOST_RECORD, **case)
    assert verdicts.judge_flashinfer({"fi-x": lost}, run(answers()))[0]["passed"] is False


BROKEN = {"state": "refused", "error": ["CUDA error"], "case": {"options": FLASHINFER}}
LOST, COMPLETE = (run(rows, options=FLASHINFER) for rows in (LOST_RECORD, answers()))


@pytest.mark.parametrize(
    ("engines", "passed"),
    [
        ([BROKEN, LOST], True),
        ([COMPLETE, COMPLETE, LOST], True),
        ([COMPLETE, COMPLETE], False),
        ([{**BROKEN, "state": "not run"}, BROKEN], False),
    ],
    ids=["broken and lost", "one lost", "none fails", "not measured"],
)
def test_some_asynchronous_engines_must_fail(engines: list[Result], passed: bool) -> None:
    named = {f"fi-{number}": engine for number, engine in enumerate(engines)}
    [row] = verdicts.judge_flashinfer(named, run(answers()))
    assert (row["passed"], row["numbers"]["engines"]) == (passed, len(engines))


def shifted(by: float) -> list[judge.Row]:
    """Answers with a less likely second token."""
    rows = answers()
    for row in rows:
        row["steps"][1] = {"2": -0.2 - by, "5": -2.5}
    return rows


@pytest.mark.parametrize(("shift", "passed"), [(0.4, True), (0.1, False)])
def test_3_bit_presets_must_have_larger_errors(shift: float, passed: bool) -> None:
    shifts = {"tq-k8v4": 0.1, "tq-4bit_nc": 0.2, "tq-3bit_nc": shift}
    engines = {name: run(shifted(by)) for name, by in shifts.items()}
    rows = verdicts.judge_turboquant(engines, run(answers()))
    assert verdicts_by_engine(rows)["tq-3bit_nc"] is passed


@pytest.mark.parametrize(
    ("name", "loses"), [("tq-k8v4-stock-alone", False), ("tq-k8v4-stock-full-mtp2", True)]
)
def test_stock_backend_must_lose_answers_with_drafts(name: str, loses: bool) -> None:
    for rows in (answers(), LOST_RECORD):
        engine = run(rows, stock_turboquant=True)
        [row] = verdicts.judge_turboquant({name: engine}, run(answers()))
        assert row["passed"] is ((rows is LOST_RECORD) == loses)


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
def test_recorded_rows_pass_and_detect_damage(name: str) -> None:
    path = CHECKOUT / f"proofs/results/gpu/{name}.json"
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert [row["claim"] for row in rows if row["passed"] is False] == []
    words = ("damage", "noise", "fi-gdn-states")
    damaged = [row for row in rows if row["passed"] and any(word in row["claim"] for word in words)]
    assert len(damaged) == DAMAGED[name]
