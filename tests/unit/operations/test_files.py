"""What lies at paths of ours is asked in one question, however many operations look at it."""

from __future__ import annotations

from typing import Any

from spark_deploy.hosts.files import expect_files, file_states, place_files
from spark_deploy.plan.types import ManagedFile
from tests.unit.operations.test_operations import FakeHost, on

ONE, TWO = ManagedFile("/etc/one", b"1"), ManagedFile("/etc/two", b"2", 0o600)


class Disk(FakeHost):
    """A host with files that records the paths of each query."""

    def __init__(self, *files: ManagedFile):
        super().__init__(files=files)
        self.questions: list[tuple[str, ...]] = []

    def get_fact(self, fact: Any, **arguments: Any) -> Any:
        self.questions.append(tuple(arguments["paths"]))
        return super().get_fact(fact, **arguments)


def placed(*files: ManagedFile) -> list[Any]:
    return list(place_files(files))


def test_one_question_asks_for_all_that_a_run_will_look_at() -> None:
    host = Disk(ONE, TWO)
    with on(host):
        expect_files([ONE.path])
        expect_files([TWO.path, "/etc/none"])
        assert (placed(TWO), placed(ONE)) == ([], [])
        assert file_states(["/etc/none"]) == {}
    assert host.questions == [(ONE.path, TWO.path, "/etc/none")]


def test_after_a_command_it_is_asked_again() -> None:
    host = Disk(ONE)
    with on(host) as state:
        expect_files([ONE.path, TWO.path])
        assert len(placed(TWO)) == 1
        done = type("Done", (), {"operation_meta": type("Meta", (), {"executed": True})})
        state.ops[host]["an operation"] = done
        host.files[TWO.path] = TWO
        assert placed(TWO) == []
    assert len(host.questions) == 2


def test_what_nobody_spoke_of_is_asked_for_all_the_same() -> None:
    host = Disk(ONE)
    with on(host):
        assert placed(ONE) == []
        assert len(placed(TWO)) == 1
    assert host.questions == [(ONE.path,), (ONE.path, TWO.path)]
