"""A lab test that says "nothing changed" must not pass on a run that failed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runs import Run, Silence

IDLE = {"name": "Base | Disable sleep", "success": [], "error": [], "no_change": ["spark-1"]}
CHANGED = {**IDLE, "success": ["spark-1"], "no_change": []}
FAILED = {**IDLE, "error": ["spark-1"], "no_change": []}


def told(document: dict[str, Any], exit_code: int = 0) -> Run:
    return Run(exit_code, document, "what it said", 1.0, Silence(0.0, ""))


def of(*operations: dict[str, Any]) -> dict[str, Any]:
    return {"results": {"operations": list(operations)}}


def test_a_good_run_that_had_nothing_to_do_changed_nothing() -> None:
    told(of(IDLE)).must_have_changed_nothing()


@pytest.mark.parametrize("document", [{}, {"unreadable": "x"}, {"plan": [], "results": None}])
@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_run_without_results_does_not_say_what_it_changed(
    document: dict[str, Any], exit_code: int
) -> None:
    run = told(document, exit_code)
    with pytest.raises(AssertionError, match="what it said"):
        run.must_have_changed_nothing()
    with pytest.raises(AssertionError, match="no results"):
        _ = run.changed
    with pytest.raises(AssertionError, match="no results"):
        run.changed_on("spark-1")


@pytest.mark.parametrize(
    ("document", "exit_code"),
    [(of(), 0), (of(FAILED), 0), (of(IDLE, FAILED), 0), (of(IDLE, CHANGED), 0), (of(IDLE), 1)],
)
def test_a_run_that_failed_changed_or_looked_at_nothing_is_told_apart(
    document: dict[str, Any], exit_code: int
) -> None:
    with pytest.raises(AssertionError, match="what it said"):
        told(document, exit_code).must_have_changed_nothing()
