"""Questions that are asked before anybody needs the answer: side by side, and only while true."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from spark_deploy.hosts import facts
from spark_deploy.hosts.facts import HostFact, expect_fact, prefetch, read_fact
from tests.unit.operations.test_operations import FakeHost, on


class Said(HostFact[list[str]]):
    """What a script prints."""

    default = list

    def command(self, script: str) -> str:
        return script

    def process(self, output: Iterable[str]) -> list[str]:
        return list(output)


class Long(Said):
    """The same, of one that takes its time."""


class Unended(Said):
    """The same, of one whose last line has no end."""


class Failing(Said):
    """The same, of one that fails."""


class Answering(FakeHost):
    """A host with a shell, that counts how many commands run on it at once."""

    def __init__(self) -> None:
        super().__init__({})
        self.under_way = self.most_at_once = self.ran = 0

    def run_shell_command(self, command: object, **_: Any) -> tuple[bool, Any]:
        self.ran += 1
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        gevent.sleep(0.01)
        self.under_way -= 1
        done = subprocess.run(["sh", "-c", str(command)], capture_output=True, text=True,
                              check=False)  # fmt: skip
        told = SimpleNamespace(stdout_lines=done.stdout.splitlines(), output=done.stderr)
        return done.returncode == 0, told


QUESTIONS = {
    Said: ("echo a; echo; exit 0", ["a", ""]),
    Long: ("echo b", ["b"]),
    Unended: ("printf c", ["c"]),
}


def answer(kind: type[Said]) -> list[str]:
    return read_fact(kind, script=QUESTIONS[kind][0])


@pytest.fixture
def host() -> Iterator[Answering]:
    host = Answering()
    with on(host):
        expect_fact(Long, lambda: {"script": QUESTIONS[Long][0]}, slow=True)
        expect_fact(Failing, lambda: {"script": "echo half; exit 1"})
        expect_fact(Said, lambda: {"script": QUESTIONS[Said][0]})
        expect_fact(Unended, lambda: {"script": QUESTIONS[Unended][0]})
        yield host


def test_all_that_is_expected_is_asked_at_once_and_then_known(host: Answering) -> None:
    prefetch()
    assert (host.ran, host.most_at_once) == (2, 2)
    assert {kind: answer(kind) for kind in QUESTIONS} == {
        kind: said for kind, (_, said) in QUESTIONS.items()
    }
    prefetch()
    assert (host.ran, host.asked) == (2, 0)


def test_another_question_of_the_same_kind_is_asked(host: Answering) -> None:
    prefetch()
    read_fact(Said, script="echo another")
    assert host.asked == 1


def test_what_failed_is_asked_by_who_needs_it(host: Answering) -> None:
    prefetch()
    read_fact(Failing, script="echo half; exit 1")
    assert host.asked == 1


def test_a_host_that_is_gone_is_asked_by_who_needs_it(
    host: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise EOFError

    monkeypatch.setattr(host, "run_shell_command", gone)
    prefetch()
    answer(Said)
    assert host.asked == 1


def test_an_answer_is_forgotten_after_some_seconds_and_after_a_command(
    host: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetch()
    monkeypatch.setattr(facts, "MAX_AGE_S", -1)
    answer(Said)
    assert host.asked == 1
    monkeypatch.undo()
    monkeypatch.setattr(facts, "commands_executed", lambda on: 1)
    answer(Long)
    assert host.asked == 2


def test_a_prediction_asks_nothing_ahead() -> None:
    host = Answering()
    with on(host, executing=False):
        expect_fact(Said, lambda: {"script": "echo a"})
        prefetch()
    assert host.ran == 0
