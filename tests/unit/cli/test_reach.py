"""Hosts that let nobody in are told with what helps; those that take their time by name."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from spark_deploy.cli import query_hosts, reach
from spark_deploy.inventory.host_keys import Endpoint, Seen
from spark_deploy.inventory.login import Access


@pytest.mark.parametrize(
    ("reason", "helps"),
    [
        ("Could not connect (Unable to connect to port 22 on 10.0.0.7)", "see that it is on"),
        ("Could not resolve hostname ([Errno -2] Name or service not known)", "its address"),
        ("Authentication error (username=spark)", "spark-deploy up"),
        ("SSH error (StrictPolicy: No host key for a found in known_hosts)", "spark-deploy up"),
    ],
)
def test_why_a_host_cannot_be_reached_is_said_with_what_helps(reason: str, helps: str) -> None:
    said = reach.with_fix(reason)
    assert said.startswith(f"{reason}; fix: ")
    assert helps in said


def test_a_reason_that_nobody_foresaw_is_said_without_a_guess() -> None:
    assert reach.with_fix("SSH error (odd)") == "SSH error (odd)"


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """One host that is ready, one that does not know our key, one that is off and slow."""

    def look(one: Endpoint) -> Seen:
        time.sleep(0.2 if one.host == "off" else 0)
        state: Any = "unreachable" if one.host == "off" else "known"
        return Seen(one, one.hostname, tmp_path, state, None, None, "no route")

    monkeypatch.setattr(reach, "look", look)
    monkeypatch.setattr(reach, "try_key", lambda one: Access(one.host == "ready", True))
    return [SimpleNamespace(name=name, data={}) for name in ("ready", "strange", "off")]


def test_each_host_that_is_not_ready_is_told_with_what_helps(three: list[Any]) -> None:
    off, strange = reach.reach(three).problems()
    assert str(off).startswith("off: cannot be reached at off: no route\n  fix: see that it is on")
    assert str(strange).startswith("strange: does not let our key in")
    assert "fix: run `spark-deploy up`" in str(strange)


def test_this_machine_is_closed_where_sudo_asks_for_a_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Endpoint] = []
    monkeypatch.setattr(reach, "look", looked.append)
    monkeypatch.setattr(reach, "try_key", lambda one: Access(True, False))
    found = reach.reach([SimpleNamespace(name="@local", data={})])
    assert [one.host for one in found.closed] == ["@local"]
    assert "deploys/bootstrap.py" in next(found.problems()).fix
    assert not looked


def test_whoever_waits_for_a_login_is_told_for_whom(
    three: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reach, "QUIET_S", 0.05)
    reach.reach(three)
    assert capsys.readouterr().err == "asking ready, strange, off: 0 s\n"
    reach.reach(three[:2])
    assert capsys.readouterr().err == ""


def test_of_hosts_that_take_their_time_those_are_named_that_did_not_answer_yet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(_state: Any, host: Any, listed: Any, *_more: Any) -> query_hosts.Answer[str]:
        gevent.sleep(0.3 if host.name == "slow" else 0)
        return query_hosts.Answer(listed, "yes")

    monkeypatch.setattr(query_hosts, "QUIET_S", 0.1)
    monkeypatch.setattr(query_hosts, "_one", one)
    hosts: list[Any] = [SimpleNamespace(name=name, data={}) for name in ("fast", "slow")]
    query_hosts.look(hosts, lambda *_: "yes", doing="stopping")
    assert capsys.readouterr().err == "stopping slow: 0 s\n"
    query_hosts.look(hosts[:1], lambda *_: "yes")
    assert capsys.readouterr().err == ""
