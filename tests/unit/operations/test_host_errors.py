"""A refused or lost host is one message of that host, and no traceback of the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyinfra.api.command import FunctionCommand
from pyinfra.api.exceptions import PyinfraError

from spark_deploy.hosts.facts import FactUnavailable
from spark_deploy.hosts.operations import host_command, host_errors, refuse
from tests.unit.operations.test_operations import FakeHost, on


def host(*, connected: bool) -> Any:
    made: Any = FakeHost({})
    transport = SimpleNamespace(is_active=lambda: connected)
    made.connector = SimpleNamespace(client=SimpleNamespace(get_transport=lambda: transport))
    return made


@host_errors
def asks(error: Exception) -> Any:
    raise error
    yield


def said(error: Exception, *, connected: bool, executing: bool = True) -> str:
    with on(host(connected=connected), executing):
        [command] = asks(error)
    assert isinstance(command, FunctionCommand)
    return str(command.args[0])


@pytest.mark.parametrize("error", [PyinfraError("No hosts remaining!"), FactUnavailable("no fact")])
def test_a_host_that_is_lost_while_it_is_asked_says_so(error: Exception) -> None:
    text = said(error, connected=False)
    assert text.startswith("spark-1: asks: unreachable")
    assert text.endswith("fix: run again; finished steps stay done")
    assert "defect" not in text


def test_a_question_that_fails_on_a_host_that_is_there_says_what() -> None:
    text = said(FactUnavailable("could not read the state"), connected=True)
    assert "asks: could not read the state\n" in text


def test_anything_else_is_a_defect_of_ours() -> None:
    assert "asks: KeyError: 'x'\n  fix: report this" in said(KeyError("x"), connected=True)


def test_while_predicting_pyinfra_ends_as_it_does() -> None:
    with on(host(connected=False), False), pytest.raises(PyinfraError):
        list(asks(PyinfraError("No hosts remaining!")))


WHY = ["disk: is full", "  fix: free some"]


@host_errors
def operation() -> None:
    refuse("disk", "is full", "free some")


@host_command
def command(state: Any, host: Any, what: str) -> bool:
    refuse("disk", what, "free some")


@pytest.mark.parametrize("executing", [True, False])
def test_an_operation_that_refuses_fails_its_host_and_says_why_once(executing: bool) -> None:
    host = FakeHost({})
    with on(host, executing) as state:
        [failing] = operation()
        assert host.logs == ([] if executing else WHY)
        if executing:
            assert failing.execute(state, host, {}) is False
    assert host.logs == WHY


def test_a_command_that_refuses_fails_its_host_and_says_why() -> None:
    host = FakeHost({})
    with on(host) as state:
        assert FunctionCommand(command, ["is full"], {}).execute(state, host, {}) is False
    assert host.logs == WHY
