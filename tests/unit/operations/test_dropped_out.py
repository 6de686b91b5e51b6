"""A host that drops out: waited for a while, and no reason to hold back others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyinfra.api.exceptions import ConnectError

from spark_deploy.hosts import commands, releases
from spark_deploy.hosts.operations import Refused
from tests.unit.operations.test_operations import FakeHost, on


class Wired:
    """A host behind a cable; ``answers`` are what commands give, an exception cuts the cable."""

    name = "spark-1"

    def __init__(self, *answers: Any, plugged: bool = True):
        self.answers, self.plugged, self.logs, self.connects = list(answers), plugged, [], 0
        self.connected, self.data, self.with_sudo = True, {"_sudo": True}, []
        transport = SimpleNamespace(is_active=lambda: self.plugged)
        self.connector = SimpleNamespace(client=SimpleNamespace(get_transport=lambda: transport))

    def run_shell_command(self, *_: Any, _sudo: bool, **__: Any) -> tuple[bool, Any]:
        self.with_sudo.append(_sudo)
        answer = self.answers.pop(0) if self.answers else OSError("no route")
        if isinstance(answer, Exception):
            self.plugged = False
            raise answer
        self.plugged = answer != "cut"
        return self.plugged, SimpleNamespace(stdout=answer, stderr="")

    def connect(self, **_: Any) -> None:
        self.connects += 1
        self.connected = True

    def disconnect(self) -> None:
        self.plugged = self.connected = False

    def log(self, text: str, **_: Any) -> None:
        self.logs.append(text)

    log_styled = log


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(commands.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(commands.gevent, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    return now


@pytest.mark.parametrize("loss", [OSError("gone"), EOFError(), TimeoutError(), "cut"])
def test_a_lost_connection_is_made_again_and_the_question_asked_again(
    clock: list[float], loss: Any
) -> None:
    host = Wired(loss, "here")
    assert commands.run_reconnecting(host, "true") == (True, "here", "")
    assert host.connects == 1


def test_a_command_that_fails_on_a_host_that_is_there_is_not_repeated(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Wired("no")
    monkeypatch.setattr(
        host, "run_shell_command", lambda *_, **__: (False, SimpleNamespace(stdout="", stderr="x"))
    )
    assert commands.run_reconnecting(host, "false") == (False, "", "x")
    assert host.connects == 0


@pytest.mark.parametrize("sudo", [True, False])
def test_pauses_grow_until_the_host_is_back_and_sudo_is_used_only_where_it_is_set(
    clock: list[float], sudo: bool
) -> None:
    host = Wired(*[OSError("gone")] * 5, "here")
    host.data["_sudo"] = sudo
    assert commands.run_reconnecting(host, "true") == (True, "here", "")
    assert clock[0] == 1 + 2 + 3 + 4 + 5
    assert host.logs == ["connection lost (OSError); reconnecting"]
    assert set(host.with_sudo) == {sudo}


def test_a_host_that_stays_away_is_given_up_after_minutes(clock: list[float]) -> None:
    with pytest.raises(ConnectError, match="unreachable for"):
        commands.run_reconnecting(Wired(), "true")
    assert commands.AWAY_S <= clock[0] < commands.AWAY_S + 30


def test_a_change_on_a_host_that_is_lost_fails_and_says_that_the_host_goes_on(
    clock: list[float],
) -> None:
    host = Wired()
    assert not releases.change_now(None, host, "main-aaaaaaaaaaaa", 60)  # type: ignore[arg-type]
    assert "takes it back, by itself" in host.logs[-1]


def held_back() -> str:
    """Return why the current host has to wait; empty when it does not."""
    try:
        releases.hold_back("left alone")
    except Refused as refused:
        return str(refused)
    return ""


def others(host: FakeHost, *there: Any) -> None:
    host.state = SimpleNamespace(
        inventory=list(there), results={one: SimpleNamespace(error_ops=1) for one in there}
    )


@pytest.mark.parametrize(("plugged", "held"), [(True, True), (False, False)])
def test_a_host_lost_before_its_change_blocks_nobody_and_a_failed_one_does(
    plugged: bool, held: bool
) -> None:
    host = FakeHost({})
    others(host, Wired(plugged=plugged))
    with on(host):
        assert bool(held_back()) == held


def test_only_the_host_that_failed_is_blamed_and_not_those_that_were_left_alone() -> None:
    failed, second, third = FakeHost({}), FakeHost({}), FakeHost({})
    failed.name, second.name = "first", "second"
    for host, wrong in ((second, [failed]), (third, [failed, second])):
        others(host, *wrong)
        with on(host):
            assert "because first failed first" in held_back()


def test_a_host_lost_during_its_own_change_holds_the_others_back(clock: list[float]) -> None:
    lost, host = Wired(), FakeHost({})
    releases.change_now(None, lost, "main-aaaaaaaaaaaa", 60)  # type: ignore[arg-type]
    others(host, lost)
    with on(host):
        assert "left alone, because spark-1 failed first" in held_back()
