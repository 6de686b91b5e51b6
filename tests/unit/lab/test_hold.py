"""The tests that kill a controller hold every kind of job and phase, or say here why not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from spark_contract.job import JobKind

import tests.faults.test_killed_controller as killed
import tests.faults.test_killed_controller_long as killed_long
from spark_deploy.config.checkout import CHECKOUT
from tests.faults import hold
from tests.faults.hold import JOBS

JOBS_NOT_HELD = {
    "requantize": "its container is killed between two blocks in tests/host/test_requantize.py",
    "discard": "killed at every call in tests/unit/checkpoint/test_builder_discard.py",
}


def calls(path: Path, name: str) -> Iterator[tuple[ast.FunctionDef, ast.Call]]:
    """Yield the calls of a name in a file, each with the function around it."""
    for function in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called = node.func
                found = called.attr if isinstance(called, ast.Attribute) else None
                if (called.id if isinstance(called, ast.Name) else found) == name:
                    yield function, node


def texts(value: ast.expr, function: ast.FunctionDef) -> set[str]:
    """Return what an expression can be; a name stands for all that is assigned to it."""
    if isinstance(value, ast.Constant):
        return {str(value.value)}
    if isinstance(value, ast.IfExp):
        return texts(value.body, function) | texts(value.orelse, function)
    assert isinstance(value, ast.Name), f"cannot read {ast.unparse(value)} in {function.name}"
    assigned = [
        node.value
        for node in ast.walk(function)
        if (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == value.id)
        or (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == value.id)
    ]
    assert assigned, f"{value.id} is not assigned in {function.name}"
    return set().union(*(texts(one, function) for one in assigned))


def phases_of_changes() -> set[str]:
    found: set[str] = set()
    for path in sorted((CHECKOUT / "files/host/spark_host").rglob("*.py")):
        for function, call in calls(path, "phase"):
            found |= texts(call.args[0], function)
    return found


def test_every_kind_of_job_is_held_or_excused() -> None:
    assert set(get_args(JobKind)) == set(JOBS) | set(JOBS_NOT_HELD)
    assert not set(JOBS) & set(JOBS_NOT_HELD)
    assert set(killed.IS_PROVEN) == set(killed.FORGET) == set(JOBS)
    assert {*killed.QUICK_JOBS, *killed_long.LONG_JOBS} == set(JOBS)


def test_every_phase_of_a_change_is_held() -> None:
    assert phases_of_changes() == {
        *killed.QUICK_PHASES, *killed_long.FURTHER_PHASES, *killed_long.LONG_PHASES,
    }  # fmt: skip


def test_the_programs_that_hold_work_can_be_handed_to_python() -> None:
    for program in (hold._JOB, hold._SWITCH):
        assert "\0" not in hold._COMMON + program
        compile("LIMIT_S = 1\n" + hold._COMMON + program, "guest", "exec")
