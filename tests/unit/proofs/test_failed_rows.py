"""A result file keeps what was answered where a row failed, and nothing where all held."""

from typing import Any

import pytest

from proofs import result_files
from proofs.recall import run as recall_run

SAID = {"tokens": [1, 2], "text": "one two", "logprobs": [-0.1, -0.2], "margins": [1.0, 2.0]}
KEPT = {"tokens": [1, 2], "text": "one two"}


def row(passed: bool | None, *cases: str, claim: str = "claim") -> dict[str, Any]:
    return {"claim": claim, "passed": passed, "cases": list(cases), "numbers": {}}


def test_engines_of_failed_rows_are_named_and_no_others() -> None:
    rows = [row(True, "a", "b"), row(False, "c", "b"), row(None, "d")]
    assert result_files.failed_engines(rows) == {"b", "c"}
    assert result_files.failed_engines([row(False, claim="e: judged")]) == {"e"}


def test_answers_of_every_turn_are_kept_as_they_were() -> None:
    result = {"answers": [SAID], "turns": [{"answers": [SAID]}], "other_beginning": [SAID]}
    assert result_files.raw_answers(result) == {
        "answers": [KEPT], "turns": [[KEPT]], "other_beginning": [KEPT]
    }  # fmt: skip
    assert result_files.raw_answers({"state": "refused"}) == {}


def asked(right: bool) -> dict[str, Any]:
    about = {"length": 4096, "kind": "record", "depth": 0.5, "right": right, "tokens": [7]}
    return {**about, "logprobs": [-1.0], "steps": [{"7": -1.0}]}


@pytest.mark.parametrize(("passed", "kept"), [(False, True), (True, False), (None, False)])
def test_a_recall_result_keeps_wrong_answers_of_failed_rows(passed, kept) -> None:
    result = {"state": "ran", "case": {"options": {}}, "recall": [asked(True), asked(False)]}
    document = recall_run.document("recall", {"one": result}, [row(passed, "one")], {})
    wrong = [{"kind": "record", "length": 4096, "depth": 0.5, "tokens": [7]}]
    assert document["runs"]["one"].get("wrong_in_recall") == (wrong if kept else None)


def engines(rows, failure=None) -> dict[str, Any]:
    ran = {"case": {"options": {}, "tree": "/trees/t"}, "state": "ran", "log_lines": []}
    results = {name: {**ran, "answers": [SAID]} for name in ("one", "two")}
    return {
        n: engine.get("answers")
        for n, engine in result_files.describe_engines(results, rows, failure).items()
    }


def test_an_engine_result_keeps_answers_of_failed_rows() -> None:
    rows = [row(False, "one"), row(True, "two")]
    assert engines(rows) == {"one": [KEPT], "two": None}


def test_an_engine_result_keeps_every_answer_where_judging_broke_off() -> None:
    assert engines([], failure="Traceback") == {"one": [KEPT], "two": [KEPT]}


@pytest.mark.parametrize("passed", [True, False])
def test_a_result_of_releases_keeps_answers_of_failed_rows(passed) -> None:
    from proofs.releases import run as releases

    result = {"state": "served", "answers": [SAID], "compared": {"answers": []}}
    kept = releases._kept("one", result, [row(passed, "one")])
    assert ("answers" in kept, "compared" in kept) == (not passed, not passed)
