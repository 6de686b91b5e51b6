"""A lost connection is found again; a run that waits is not silent meanwhile."""

from types import SimpleNamespace
from typing import Any

import pytest
from paramiko import SSHException
from pyinfra.api.exceptions import ConnectError

from spark_deploy.hosts import commands


class RebootingHost:
    """Connects and fails as pyinfra's does: `connect` only raises when asked to."""

    name = "spark-1"

    def __init__(self, failing_connects: int, sudo: bool = True):
        self.connected, self.failing, self.said = True, failing_connects, []
        self.lost, self.data, self.with_sudo = True, {"_sudo": sudo}, []

    def connect(self, raise_exceptions: bool = False, **_: Any) -> None:
        if not self.failing:
            self.connected, self.lost = True, False
            return
        self.failing -= 1
        if raise_exceptions:
            raise ConnectError("Could not connect (No route to host)")

    def disconnect(self) -> None:
        self.connected = False

    def run_shell_command(self, command: Any, *, _sudo: bool, _timeout: int) -> Any:
        self.with_sudo.append(_sudo)
        if not self.connected:
            raise AttributeError("'NoneType' object has no attribute 'open_session'")
        if self.lost:
            raise SSHException("SSH session not active")
        return True, SimpleNamespace(stdout="42", stderr="")

    def log(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    slept = []
    monkeypatch.setattr(commands.gevent, "sleep", slept.append)
    monkeypatch.setattr(commands.time, "monotonic", lambda: float(sum(slept)))
    return slept


def test_a_host_that_reboots_is_asked_until_it_is_back(quick):
    host = RebootingHost(failing_connects=5)
    assert commands.run_reconnecting(host, "cat boot_id") == (True, "42", "")
    assert host.said == ["connection lost (SSHException); reconnecting"]
    assert quick[-6:] == [1, 2, 3, 4, 5, 6]


def test_a_host_that_stays_away_ends_the_waiting():
    with pytest.raises(ConnectError, match="unreachable for"):
        commands.run_reconnecting(RebootingHost(failing_connects=10**6), "true")


@pytest.mark.parametrize("sudo", [True, False])
def test_waiting_asks_for_sudo_only_where_the_host_wants_it(sudo):
    host = RebootingHost(failing_connects=2, sudo=sudo)
    assert commands.run_reconnecting(host, "true")[0]
    assert host.with_sudo == [sudo, sudo]
