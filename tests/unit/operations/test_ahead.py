"""Questions that are asked before anybody needs the answer: side by side, and only while true."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from spark_deploy.facts import memo
from spark_deploy.facts.memo import read
from spark_deploy.facts.service.share import LoginAddress
from spark_deploy.facts.service.tools import PythonSite, SymlinkTarget
from spark_deploy.operations.ahead import ask, expect
from tests.unit.operations.test_operations import FakeHost, on

SITE = ["3.11 x86_64", "-", "-", "-", "-"]


class Answering(FakeHost):
    """A host that takes its time, and says how many questions it was asked at once."""

    def __init__(self) -> None:
        super().__init__({})
        self.output, self.ok = SITE, True
        self.under_way = self.most_at_once = self.ran = 0

    def run_shell_command(self, command: object, **_: Any) -> tuple[bool, Any]:
        self.ran += 1
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        gevent.sleep(0.01)
        self.under_way -= 1
        lines = SITE if "python3" in str(command) else ["/there"]
        return self.ok, SimpleNamespace(stdout_lines=lines, output="it failed")


@pytest.fixture
def host() -> Iterator[Answering]:
    host = Answering()
    with on(host):
        expect(PythonSite)
        expect(SymlinkTarget, lambda: {"path": "/a"})
        expect(LoginAddress)
        yield host


def test_all_that_is_expected_is_asked_at_once_and_then_known(host: Answering) -> None:
    ask()
    assert (host.ran, host.most_at_once) == (3, 3)
    assert read(PythonSite).python_version == "3.11"
    assert read(SymlinkTarget, path="/a") == "/there"
    ask()
    assert (host.ran, host.asked) == (3, 0)


def test_another_question_of_the_same_kind_is_asked(host: Answering) -> None:
    ask()
    host.output = ["/elsewhere"]
    assert read(SymlinkTarget, path="/b") == "/elsewhere"


def test_what_got_no_answer_is_asked_by_who_needs_it(host: Answering) -> None:
    host.ok = False
    ask()
    assert read(PythonSite).machine == "x86_64"
    assert host.asked == 1


def test_an_answer_is_forgotten_after_some_seconds_and_after_a_command(
    host: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask()
    monkeypatch.setattr(memo, "CROSSES_S", -1)
    read(PythonSite)
    assert host.asked == 1
    monkeypatch.undo()
    monkeypatch.setattr(memo, "commands_executed", lambda on: 1)
    host.output = ["/there"]
    read(SymlinkTarget, path="/a")
    assert host.asked == 2


def test_a_prediction_asks_nothing_ahead() -> None:
    host = Answering()
    with on(host, executing=False):
        expect(PythonSite)
        ask()
    assert host.ran == 0
