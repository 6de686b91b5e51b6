import pytest

from tests.runs import Run, Silence

IDLE = {"name": "Base | Disable sleep", "success": [], "error": [], "no_change": ["spark-1"]}
CHANGED = {**IDLE, "success": ["spark-1"], "no_change": []}
FAILED = {**IDLE, "error": ["spark-1"], "no_change": []}


def run_of(document, exit_code=0):
    return Run(exit_code, document, "", 1.0, Silence(0.0, ""))


def results(*operations):
    return {"results": {"operations": list(operations)}}


def test_assert_unchanged_accepts_run_without_changes():
    run_of(results(IDLE)).assert_unchanged()


@pytest.mark.parametrize(
    ("document", "exit_code"),
    [
        ({}, 0), ({"unreadable": "x"}, 0), ({"plan": [], "results": None}, 1), (results(), 0),
        (results(FAILED), 0), (results(IDLE, FAILED), 0), (results(IDLE, CHANGED), 0),
        (results(IDLE), 1),
    ],
)  # fmt: skip
def test_assert_unchanged_rejects_changed_failed_and_empty_runs(document, exit_code):
    with pytest.raises(AssertionError):
        run_of(document, exit_code).assert_unchanged()
