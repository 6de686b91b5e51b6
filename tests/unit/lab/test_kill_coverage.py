import ast
from typing import get_args

from spark_contract.job import JobKind

from spark_deploy.config.checkout import CHECKOUT
from tests.faults import test_killed_controller as killed
from tests.faults.pause import JOBS

JOBS_ELSEWHERE = {
    "requantize": "its container is killed between two blocks in tests/host/test_requantize.py",
    "rank": "killed at every call in tests/unit/checkpoint/test_ranking.py",
    "discard": "killed at every call in tests/unit/checkpoint/test_builder_verify.py",
}


def calls(path, name):
    for function in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called = node.func
                attribute = called.attr if isinstance(called, ast.Attribute) else None
                if (called.id if isinstance(called, ast.Name) else attribute) == name:
                    yield function, node


def possible_values(value, function):
    if isinstance(value, ast.Constant):
        return {str(value.value)}
    if isinstance(value, ast.IfExp):
        return possible_values(value.body, function) | possible_values(value.orelse, function)
    assert isinstance(value, ast.Name), f"cannot read {ast.unparse(value)} in {function.name}"
    assigned = [
        node.value
        for node in ast.walk(function)
        if (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == value.id)
        or (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == value.id)
    ]
    assert assigned, f"{value.id} is not assigned in {function.name}"
    return set().union(*(possible_values(expression, function) for expression in assigned))


def test_kill_tests_cover_every_job_type():
    assert set(get_args(JobKind)) == set(JOBS) | set(JOBS_ELSEWHERE)
    assert not set(JOBS) & set(JOBS_ELSEWHERE)
    assert set(killed.IS_PROVEN) == set(killed.FORGET) == set(JOBS)
    assert {*killed.GATE_JOBS, killed.LONG_JOB} == set(JOBS)


def test_kill_tests_cover_every_rollout_phase():
    phases: set[str] = set()
    for path in sorted((CHECKOUT / "files/host/spark_host").rglob("*.py")):
        for function, call in calls(path, "phase"):
            phases |= possible_values(call.args[0], function)
    assert phases == {*killed.GATE_PHASES, *killed.MORE_PHASES, killed.BENCH, killed.ROLLBACK}
