"""One host is refused with a reason, in a prediction too, and no other host with it."""

from __future__ import annotations

from typing import Any

import pytest
from pyinfra.api.command import FunctionCommand

from spark_deploy.hosts.host_errors import host_command, host_errors, refuse
from tests.unit.operations.test_operations import FakeHost, on

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
