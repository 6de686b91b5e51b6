"""The judges of the recall proofs detect wrong answers and damage."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from proofs.recall import judge, verdicts

RESULTS = Path(__file__).parents[3] / "proofs/results"
LENGTH = 1000


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


def run(rows: list[judge.Row], **case: Any) -> dict[str, Any]:
    return {"state": "ran", "case": {"options": {}, **case}, "recall": rows}


def verdict(results: dict[str, Any]) -> list[bool | None]:
    return [row["passed"] for row in verdicts.judge_recall(results, run(answers()))]


def test_model_and_engine_must_find_records() -> None:
    assert verdict({"recall-16bit": run(answers())}) == [True]
    assert verdict({"recall-16bit": run(answers(lost=(0.5, 0.65)))}) == [False]
    assert verdict({"tq": run(answers())}) == [True]
    assert verdict({"tq": run(answers(lost=(0.5, 0.55)))}) == [False]


def test_unreliable_answers_of_the_model_are_ignored() -> None:
    lost, doubtful = answers(lost=(0.5, 0.55)), answers()
    doubtful[10]["logprobs"] = [-0.1, -0.8]
    for reference in (lost, doubtful):
        rows = verdicts.judge_recall({"tq": run(lost)}, run(reference))
        assert [row["passed"] for row in rows] == [True]
        assert rows[0]["numbers"]["found"]["sure_in_16bit"] == 19
    elsewhere = verdicts.judge_recall({"tq": run(answers(lost=(0.3, 0.35)))}, run(lost))
    assert [row["passed"] for row in elsewhere] == [False]


def test_engine_without_answers_fails() -> None:
    assert verdicts.judge_turboquant({"tq": {"state": "died", "case": {}}}, run(answers()))[0][
        "passed"
    ] is False  # fmt: skip
    died = {"talk-cache": {"state": "died", "case": {"options": {}}}}
    assert [row["passed"] for row in verdicts.judge_prefixes(died, {})] == [False]


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        (answers(lost=(0.25, 0.5)), True),
        (answers(), False),  # the damage has no effect
        (answers(lost=(0.0, 1.0)), False),  # other answers are lost as well
    ],
)
def test_only_the_removed_band_may_be_lost(rows: list[judge.Row], passed: bool) -> None:
    assert verdict({"damage-band": run(rows, damage={"band": [250, 500]})}) == [passed]


def test_lost_states_must_cost_registers() -> None:
    damage = {"damage": {"states": []}}
    assert verdict({"damage-states": run(answers(registers_right=False), **damage)}) == [True]
    assert verdict({"damage-states": run(answers(), **damage)}) == [False]


def test_depth_is_reported_by_quarters() -> None:
    assert judge.by_depth(answers(lost=(0.5, 0.75))) == [1.0, 1.0, 0.0, 1.0]


def test_divergence_grows_with_the_difference() -> None:
    reference = {"1": -0.1, "2": -3.0}
    assert judge.divergence(reference, reference) == pytest.approx(0, abs=1e-9)
    near = judge.divergence(reference, {"1": -0.12, "2": -2.8})
    far = judge.divergence(reference, {"1": -1.0, "2": -0.6})
    assert 0 < near < far


def test_steps_after_different_tokens_are_not_compared() -> None:
    expected, computed = answers(), answers()
    computed[0]["tokens"] = [9, 2]
    assert judge.divergences(expected, expected)["later"]["steps"] == 24
    assert judge.divergences(expected, computed)["later"]["steps"] == 23


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
            "logprobs": [-0.001, -0.002],
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


def test_equal_answers_with_cache_hits_pass() -> None:
    assert judged("talk-cache", talk(**CACHING))["passed"] is True


def test_cache_without_hits_fails() -> None:
    unused = talk(**CACHING)
    for row in unused["talks"]:
        row["hits_so_far"] = 0
    assert judged("talk-cache", unused)["passed"] is False


def test_wrong_answer_and_different_token_fail() -> None:
    wrong, other = talk(**CACHING), talk(**CACHING)
    wrong["talks"][4]["right"] = False
    other["talks"][7]["tokens"] = [1, 2]
    assert judged("talk-cache", wrong)["passed"] is False
    verdict = judged("talk-cache", other)
    assert verdict["passed"] is False
    assert verdict["numbers"]["other_than_plain"] == 1
    assert verdict["numbers"]["repeats_differ"] == 1


def test_undetected_damage_fails() -> None:
    assert judged("talk-damage-carry", talk(**CACHING))["passed"] is False
    damaged = talk(**CACHING)
    damaged["talks"][2]["right"] = False
    assert judged("talk-damage-carry", damaged)["passed"] is True


@pytest.mark.parametrize(("logprob", "passed"), [(-0.92, True), (-1.2, False), (-5.0, False)])
def test_different_answer_is_allowed_only_in_doubt(logprob: float, passed: bool) -> None:
    doubtful = talk(**CACHING)
    doubtful["talks"][4] |= {"right": False, "tokens": [4, 9], "logprobs": [-0.001, logprob]}
    assert judged("talk-cache", doubtful)["passed"] is passed
    doubtful["case"] = {"options": {}}
    assert judged("talk-damage-carry", doubtful)["passed"] is not passed


def test_answer_that_is_wrong_in_the_reference_too_passes() -> None:
    plain, same = talk(), talk(**CACHING)
    for row in plain["talks"]:
        row["hits_so_far"] = 0
    for result in (plain, same):
        result["talks"][4] |= {"right": False, "tokens": [4, 9], "logprobs": [-0.001, -5.0]}
    rows = verdicts.judge_prefixes({"talk-plain": plain, "talk-cache": same}, {})
    assert [row["passed"] for row in rows] == [False, True]  # 8 of 9 right answers: too few


def test_answer_without_a_reference_fails() -> None:
    other = talk(**CACHING)
    other["talks"][0]["prompt"] = "another"
    assert judged("talk-cache", other)["passed"] is False


def test_concurrent_answers_must_equal_sequential_answers() -> None:
    alone, five, moved = (run(answers()) for _ in range(3))
    moved["recall"][3]["tokens"] = [7, 7]
    cases = {"wide-tq-k8v4": five, "wide-tq-k8v4-alone": alone, "wide-16bit": run(answers())}
    verdicts_by_engine = {row["cases"][0]: row["passed"] for row in verdicts.judge_wide(cases, {})}
    assert verdicts_by_engine == {
        "wide-tq-k8v4": True,
        "wide-tq-k8v4-alone": None,
        "wide-16bit": None,
    }
    cases["wide-tq-k8v4"] = moved
    assert verdicts.judge_wide(cases, {})[0]["passed"] is False
    cases["wide-tq-k8v4"] = {"state": "died", "case": {}}
    assert verdicts.judge_wide(cases, {})[0]["passed"] is False


def drafting(accepted: int, rows: list[judge.Row] | None = None) -> dict[str, Any]:
    counters = {"x:num_draft_tokens": 100, "x:num_accepted_tokens": accepted}
    return {**run(rows or answers()), "counters": counters}


def test_drafts_change_no_answer_and_broken_drafter_is_detected() -> None:
    def passed(name: str, result: dict[str, Any]) -> bool | None:
        rows = verdicts.judge_drafts({"drafts-none": run(answers()), name: result}, {})
        return {row["cases"][0]: row["passed"] for row in rows}[name]

    other = answers()
    other[0]["tokens"] = [5, 5]
    assert passed("drafts-int4-mtp2", drafting(70)) is True
    assert passed("drafts-int4-mtp2", drafting(70, other)) is False
    assert passed("drafts-damage", drafting(3)) is True
    assert passed("drafts-damage", drafting(70)) is False


FLASHINFER = {"attention_config": {"backend": "FLASHINFER"}}


WAITING = (
    {"options": {**FLASHINFER, "async_scheduling": False}},
    {"options": {**FLASHINFER, "speculative_config": {}}},
    {"options": FLASHINFER, "environment": {"CUDA_LAUNCH_BLOCKING": "1"}},
    {"options": {}},
)


@pytest.mark.parametrize("case", WAITING)
def test_synchronous_engine_must_not_crash_or_lose_answers(case: dict[str, Any]) -> None:
    broken = {"state": "refused", "error": ["CUDA error: an illegal memory access"], "case": case}
    assert verdicts.judge_flashinfer({"fi-x": broken}, {})[0]["passed"] is False
    lost = run(answers(lost=(0.5, 0.55)), **case)
    assert verdicts.judge_flashinfer({"fi-x": lost}, run(answers()))[0]["passed"] is False


def test_some_asynchronous_engines_must_fail() -> None:
    def passed(*results: dict[str, Any]) -> bool | None:
        engines = {f"fi-{place}": result for place, result in enumerate(results)}
        [row] = verdicts.judge_flashinfer(engines, run(answers()))
        assert row["numbers"]["engines"] == len(results)
        passed: bool | None = row["passed"]
        return passed

    broken = {"state": "refused", "error": ["CUDA error"], "case": {"options": FLASHINFER}}
    lost, complete = (
        run(rows, options=FLASHINFER) for rows in (answers(lost=(0.5, 0.55)), answers())
    )
    assert passed(broken, lost) is True
    assert passed(complete, complete, lost) is True
    assert passed(complete, complete) is False
    assert passed({**broken, "state": "not run"}, broken) is False  # without a measurement


def shifted(by: float) -> list[judge.Row]:
    """Answers with a less likely second token."""
    rows = answers()
    for row in rows:
        row["steps"][1] = {"2": -0.2 - by, "5": -2.5}
    return rows


def test_3_bit_presets_must_have_larger_errors() -> None:
    def passed(moved: float) -> bool | None:
        engines = {"tq-k8v4": run(shifted(0.1)), "tq-4bit_nc": run(shifted(0.2))}
        engines["tq-3bit_nc"] = run(shifted(moved))
        rows = verdicts.judge_turboquant(engines, run(answers()))
        return {row["cases"][0]: row["passed"] for row in rows}["tq-3bit_nc"]

    assert passed(0.4) is True
    assert passed(0.1) is False


def test_stock_backend_must_lose_answers_with_drafts() -> None:
    def passed(name: str, rows: list[judge.Row]) -> bool | None:
        engine = run(rows, stock_turboquant=True)
        [row] = verdicts.judge_turboquant({name: engine}, run(answers()))
        passed: bool | None = row["passed"]
        return passed

    lost = answers(lost=(0.5, 0.55))
    assert passed("tq-k8v4-stock-alone", answers()) is True
    assert passed("tq-k8v4-stock-alone", lost) is False
    assert passed("tq-k8v4-stock-full-mtp2", lost) is True
    assert passed("tq-k8v4-stock-full-mtp2", answers()) is False


def committed(name: str) -> list[judge.Row]:
    rows: list[judge.Row] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


DAMAGED = {
    "gpu/recall-recall": 3,
    "gpu/recall-prefixes": 3,
    "gpu/recall-drafts": 1,
    "gpu/recall-flashinfer": 2,
    "gpu/recall-turboquant": 0,  # damaged engines are in recall-recall
    "gpu/recall-wide": 0,
}
"""Number of damaged engines that failed, by result file."""


@pytest.mark.parametrize("name", DAMAGED)
def test_recorded_rows_pass_and_detect_damage(name: str) -> None:
    rows = committed(name)
    assert [row["claim"] for row in rows if row["passed"] is False] == []
    words = ("damage", "noise", "fi-gdn-states")
    seen = [row for row in rows if row["passed"] and any(word in row["claim"] for word in words)]
    assert len(seen) == DAMAGED[name]


def test_recorded_stock_turboquant_loses_answers_with_drafts() -> None:
    rows = {row["cases"][0]: row["numbers"] for row in committed("gpu/recall-turboquant")}
    for preset in ("k8v4", "4bit_nc"):
        assert rows[f"tq-{preset}-full-mtp2"]["right"]["4096"]["passage"] == 1.0
        assert rows[f"tq-{preset}-stock-full-mtp2"]["right"]["4096"]["passage"] == 0.0


def test_recorded_model_loses_answers_only_when_damaged() -> None:
    rows = {row["cases"][0]: row["numbers"] for row in committed("gpu/recall-recall")}
    whole = rows["recall-16bit"]["found"]
    assert whole["right"] > verdicts.KNOWN * whole["asked"]
    assert rows["damage-band"]["inside"]["right"] < 0.1 < rows["damage-band"]["outside"]["right"]
    worse = copy.deepcopy(rows["damage-noise-100"]["right"])
    assert worse["131072"]["record"] < 0.5
