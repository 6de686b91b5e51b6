from collections.abc import Callable

import pytest
from paramiko import SSHException
from pyinfra.api.command import FunctionCommand
from pyinfra.api.exceptions import ConnectError, PyinfraError

from spark_deploy.hosts import commands
from spark_deploy.hosts.commands import CommandError
from spark_deploy.hosts.facts import FactUnavailableError
from spark_deploy.hosts.operations import fail, host_command, host_operation
from tests.unit.operations.fake_host import Failed, FakeHost, on


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(commands.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(commands.gevent, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    return now


def answers(*results):
    queue = list(results)

    def shell(script):
        result = queue.pop(0) if queue else OSError("no route")
        if result is None:
            host.connected = False
            return Failed("")
        return result

    host = FakeHost(shell=shell)
    return host


@pytest.mark.parametrize("loss", [OSError("gone"), EOFError(), TimeoutError(), None])
def test_lost_connection_is_restored_and_the_command_repeated(clock, loss):
    host = answers(loss, "here")
    assert commands.run_reconnecting(host, "true") == (True, "here", "")
    assert host.connects == 1


def test_does_not_repeat_a_failed_command(clock):
    host = answers(Failed("x"))
    assert commands.run_reconnecting(host, "false") == (False, "", "x")
    assert host.connects == 0


@pytest.mark.parametrize("sudo", [True, False])
def test_reconnects_with_backoff_and_keeps_the_sudo_settings(clock, sudo):
    host = answers(*[OSError("gone")] * 5, "here")
    host.data["_sudo"] = sudo
    assert commands.run_reconnecting(host, "true") == (True, "here", "")
    assert clock[0] == 1 + 2 + 3 + 4 + 5
    assert len(host.logs) == 1
    assert {options["_sudo"] for _, options in host.commands} == {sudo}


def test_host_counts_as_unreachable_after_the_reconnect_timeout(clock):
    with pytest.raises(ConnectError, match="unreachable for"):
        commands.run_reconnecting(answers(), "true")
    assert commands.RECONNECT_TIMEOUT_S <= clock[0] < commands.RECONNECT_TIMEOUT_S + 30


@host_operation
def raise_error(error):
    raise error
    yield


def message_of(error, *, connected):
    with on(FakeHost(connected=connected)):
        [command] = raise_error._inner(error)
    assert isinstance(command, FunctionCommand)
    return str(command.args[0])


@pytest.mark.parametrize(
    "error", [PyinfraError("No hosts remaining!"), FactUnavailableError("no fact")]
)
def test_lost_connection_is_reported_as_unreachable_host(error):
    text = message_of(error, connected=False)
    assert text.startswith("spark-1: raise_error: unreachable")
    assert text.endswith("fix: run again; finished steps are skipped")


def test_unexpected_error_names_the_operation_and_requests_a_report():
    unread = message_of(FactUnavailableError("could not read the state"), connected=True)
    assert "raise_error: could not read the state\n" in unread
    assert "raise_error: KeyError: 'x'\n  fix: report this" in message_of(
        KeyError("x"), connected=True
    )


def test_dry_run_reraises_pyinfra_errors():
    with on(FakeHost(connected=False), False), pytest.raises(PyinfraError):
        list(raise_error._inner(PyinfraError("No hosts remaining!")))


REFUSAL = ["disk: is full", "  fix: free some"]


@host_operation
def failing_operation():
    fail("disk", "is full", "free some")


@host_command
def failing_command(state, host):
    fail("disk", "is full", "free some")


@pytest.mark.parametrize("executing", [True, False])
def test_failing_operation_fails_its_host_and_logs_once(executing):
    host = FakeHost()
    with on(host, executing) as state:
        [command] = failing_operation._inner()
        assert host.logs == ([] if executing else REFUSAL)
        if executing:
            assert command.execute(state, host, {}) is False
    assert host.logs == REFUSAL


@host_command
def losing_command(state, host):
    try:
        raise SSHException("SSH session not active")
    except SSHException as error:
        raise CommandError("stat /etc", "SSHException SSH session not active") from error


@host_command
def broken_command(state, host):
    raise CommandError("docker info", "no such command")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (failing_command, "\n".join(REFUSAL)),
        (losing_command, "connection was lost"),
        (broken_command, "no such command"),
    ],
)
def test_failed_or_lost_command_fails_its_host_without_traceback(command, text):
    host = FakeHost()
    run: Callable[..., bool] = FunctionCommand(command, [], {}).execute
    with on(host) as state:
        assert run(state, host, {}) is False
    assert text in "\n".join(host.logs)
