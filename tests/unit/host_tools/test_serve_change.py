"""Requests and records of rollouts, rollbacks, and stopped services."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from memory_host import Model
from memory_systemd import A, B, release_of
from spark_contract import documents
from spark_contract.errors import HostToolError
from spark_contract.records import Rollout, Stopped
from spark_contract.status import Begun, NamedRelease, Rollback, UnderWay
from spark_contract.units import RETURN_TIMER, SWITCH
from spark_host.records import boot
from spark_host.rollout import record as records
from spark_host.rollout import rollout
from spark_host.rollout.record import Record

C = f"main-{'c' * 12}"


@pytest.fixture
def model() -> Model:
    return Model(known={A, B, C})


def begun(model: Model) -> dict[str, Any]:
    return records.begin(A, model.host())


def under_way(model: Model, run: str = "this-run") -> None:
    unit = model.unit(SWITCH.of(A))
    unit.state, unit.run = "activating", run


def failed(model: Model, run: str = "") -> None:
    unit = model.unit(SWITCH.of(A))
    unit.state, unit.result, unit.run = "failed", "exit-code", run


def record(model: Model, **values: Any) -> None:
    left = Record(release_of(A), model.host("this-run")).data
    model.documents[model.paths.rollout(A)] = replace(left, **{"state": "switched", **values})


def followed(model: Model, asked: Begun) -> Rollout:
    return records.poll(A, model.host(), asked.request)


def test_begin_removes_the_previous_record(model: Model) -> None:
    record(model)
    asked = begun(model)
    assert model.paths.rollout(A) not in model.documents
    assert model.asked == [A]
    under_way(model)
    assert followed(model, asked).state == "none"


@pytest.mark.parametrize(
    "stale",
    [
        {"release": B},
        {"request": "of-yesterday"},
        {"request": None},
        {"invocation_id": "an-earlier-run"},
    ],
    ids=["another release", "an older request", "no request", "an earlier run of the unit"],
)
def test_stale_record_is_ignored(model: Model, stale: dict[str, Any]) -> None:
    asked = begun(model)
    under_way(model)
    record(model)
    assert followed(model, asked).state == "switched"
    record(model, **stale)
    assert followed(model, asked).state == "none"


def test_unit_that_never_ran_is_a_failure(model: Model) -> None:
    asked = begun(model)
    record(model, request="of-yesterday")
    failed(model)
    found = followed(model, asked)
    assert found.state == "not-started"
    assert "did not run (exit-code)" in found.reason


def test_failure_without_record_reports_the_last_error(model: Model) -> None:
    asked = begun(model)
    failed(model, "run")
    model.words = [
        "error: rollout of main: another change is under way; fix: wait for it", "phase=none"
    ]  # fmt: skip
    found = followed(model, asked)
    assert found.state == "not-started"
    assert found.reason == "rollout of main: another change is under way; fix: wait for it"


def test_queued_rollout_has_not_failed(model: Model) -> None:
    asked = begun(model)
    model.unit(SWITCH.of(A)).sub = "start"  # the job is queued
    found = followed(model, asked)
    assert found.state == "none"


def test_begin_joins_a_running_rollout(model: Model) -> None:
    first = begun(model)
    under_way(model)
    record(model, state="running")
    model.asked.clear()
    second = begun(model)
    assert (second.joined, second.request) == (True, first.request)
    assert model.asked == []
    assert followed(model, second).state == "running"


def test_killed_rollout_is_interrupted(model: Model) -> None:
    asked = begun(model)
    record(model, state="running")
    assert followed(model, asked).state == "interrupted"


def test_running_rollout_needs_unit_and_open_record(
    model: Model,
) -> None:
    def seen() -> UnderWay | None:
        host = model.host()
        return records.running_rollout(
            A, host.units.state(SWITCH.of(A), "ActiveState", "Job"), host
        )

    begun(model)
    asked_at = model.documents[model.paths.request(A)].at
    assert seen() is None
    under_way(model)
    assert seen() == UnderWay(A, asked_at, None)
    record(model, state="running", phase="start", started_at="then")
    assert seen() == UnderWay(A, "then", "start")
    record(model, state="switched", phase="done")
    assert seen() is None
    record(model, state="running", invocation_id="an-earlier-run", phase="drain")
    assert seen() == UnderWay(A, asked_at, None)


def test_record_contains_request_and_run(model: Model) -> None:
    asked = begun(model)
    written = Record(release_of(A), model.host("this-run")).data
    assert (written.request, written.invocation_id) == (asked.request, "this-run")


@pytest.mark.parametrize("other", [{"invocation_id": "an-earlier-run"}, {"boot_id": "boot-0"}])
def test_only_the_same_run_recovers_a_rollout(model: Model, other: dict[str, str]) -> None:
    record(model, state="running", phase="start", **other)
    model.calls = 0
    assert rollout.recover(A, model.host("this-run")) == 0
    assert model.outcome(A).state == "running"
    assert model.calls == 0


def test_refused_unit_is_an_error(model: Model) -> None:
    model.faults = {6: "fail"}
    with pytest.raises(HostToolError, match=f"systemctl start {SWITCH.of(A)}: did not answer"):
        begun(model)


def good(model: Model, *names: str) -> None:
    """Make releases good in this order."""
    for name in names:
        model.proven.add(name)
        boot.enable_only(release_of(name), model.host())


def named(name: str) -> NamedRelease:
    return NamedRelease(name, "lab-stub", "v2")


def back(model: Model, wanted: str | None = None) -> Rollback:
    return rollout.plan_rollback("main", wanted, model.host())


def problem(model: Model, wanted: str | None = None) -> str:
    found = back(model, wanted).problem
    assert found is not None
    return f"{found.where}: {found.what}; {found.fix}"


def test_rollback_targets_the_previous_release(model: Model) -> None:
    good(model, A, B)
    way = back(model)
    assert (way.came, way.to) == (named(B), named(A))
    assert (way.done, way.problem) == (None, None)


def test_rollback_to_a_named_release(model: Model) -> None:
    good(model, A, B, C)
    assert back(model, A).to == named(A)


def test_rollback_without_previous_release_is_refused(model: Model) -> None:
    good(model, A)
    assert "nothing to go back to" in problem(model)


def test_rollback_to_an_absent_release_lists_the_present_ones(model: Model) -> None:
    good(model, A, B)
    model.known.discard(C)
    there = f"{A} (lab-stub with v2); {B} (lab-stub with v2)"
    assert f"{C}: is not a release on this host (there: {there})" in problem(model, C)


def test_rollback_to_an_incomplete_release_names_a_complete_one(model: Model) -> None:
    good(model, A, B, C)
    model.gone = {B}
    said = problem(model)
    assert f"{B}: tree" in said
    assert "is gone" in said
    assert f"name a complete release: {A} (lab-stub with v2), or" in said
    assert "model: lab-stub and profile: v2" in said
    model.gone = {A, B}
    assert "run deploy.py" in problem(model)


def test_stopped_service_is_not_rolled_back(model: Model) -> None:
    good(model, A, B)
    model.documents[model.paths.stopped("main")] = Stopped(B, "now")
    assert "stopped on purpose" in problem(model)


def test_second_rollback_does_not_toggle(model: Model) -> None:
    good(model, A, B)
    boot.note_rollback("main", A, model.host())
    good(model, A)
    assert f"{A} serves in place of {B}" in str(back(model).done)
    note = boot.rolled_back("main", model.host())
    assert note is not None
    assert note.came == B
    # By name every release can be reached.
    assert back(model, B).to == named(B)


def test_failed_rollback_does_not_count(model: Model) -> None:
    good(model, A, B)
    boot.note_rollback("main", A, model.host())
    good(model, B)  # rolled back
    assert boot.rolled_back("main", model.host()) is None
    assert back(model).to == named(A)


def test_next_rollout_clears_the_rollback(model: Model) -> None:
    good(model, A, B)
    boot.note_rollback("main", A, model.host())
    good(model, A, C)
    assert boot.rolled_back("main", model.host()) is None
    assert back(model).to == named(A)


def test_dry_rollback_changes_nothing(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    good(model, A, B)
    assert rollout.rollback(["main", "--dry"], model.host()) == 0
    assert json.loads(capsys.readouterr().out)["to"]["name"] == A
    assert model.asked == []
    assert model.paths.rollback("main") not in model.documents

    assert rollout.rollback(["main"], model.host()) == 0
    assert model.asked == [A]
    begun = documents.parse(Begun, capsys.readouterr().out)
    assert (begun.release, begun.joined, begun.came, begun.to) == (A, False, named(B), named(A))


def test_second_stop_keeps_the_first_author(model: Model) -> None:
    good(model, A)
    boot.stop_service("main", "ann@desk", model.host())
    first = model.documents[model.paths.stopped("main")]
    boot.stop_service("main", "ben@laptop", model.host())
    assert model.documents[model.paths.stopped("main")] == first
    assert (first.by, first.release) == ("ann@desk", A)


def test_timed_stop_ends_and_removes_its_timer(model: Model) -> None:
    good(model, A)
    timer = RETURN_TIMER.of("main")
    boot.stop_service("main", "ann", model.host(), 3600)
    assert timer in model.links
    boot.start_when_due("main", model.host())
    assert boot.is_stopped("main", model.host()), "an hour is not over at once"
    model.pass_time(3601)
    boot.start_when_due("main", model.host())
    assert boot.active("main", model.host()) == A
    assert not boot.is_stopped("main", model.host())
    assert timer not in model.links


def test_permanent_stop_replaces_a_timed_stop(model: Model) -> None:
    good(model, A)
    boot.stop_service("main", "ann", model.host(), 60)
    boot.stop_service("main", "ben", model.host())
    assert RETURN_TIMER.of("main") not in model.links
    model.pass_time(3600)
    boot.start_when_due("main", model.host())
    assert boot.is_stopped("main", model.host())


def test_timed_stop_enables_the_timer_first(model: Model) -> None:
    good(model, A)
    host = model.host()
    asked: list[str] = []

    def noting(what: str, call: Any) -> Any:
        return lambda *words: (asked.append(what), call(*words))[1]

    host.units.enable = noting("timer", host.units.enable)  # type: ignore[method-assign]
    host.disk.write = noting("marker", host.disk.write)  # type: ignore[method-assign]
    boot.stop_service("main", "ann", host, 60)
    assert asked == ["timer", "marker"], "cut off in between it would stay down for good"


def test_manual_start_ends_a_timed_stop(model: Model) -> None:
    good(model, A)
    boot.stop_service("main", "ann", model.host(), 60)
    boot.start_service("main", model.host())
    assert RETURN_TIMER.of("main") not in model.links
    model.pass_time(3600)
    assert boot.start_when_due("main", model.host()) == 0
    assert boot.active("main", model.host()) == A


def test_rollout_record_round_trips(model: Model) -> None:
    record(model)
    said = documents.plain(model.outcome(A))
    assert documents.read(Rollout, said) == model.outcome(A)
    assert next(iter(said)) == "schema_version"
