"""A candidate whose last steps fail is taken back, and nothing names it good afterwards.

Faults are put at every call by ``test_rollout_histories.py``; here is what people are told of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from memory_host import Model
from memory_ports import MemoryEngines
from memory_systemd import A, B, release_of
from spark_contract.errors import HostToolError
from spark_contract.records import Good, Rollout
from spark_contract.release import Bench
from spark_contract.units import SERVE
from spark_host.engine.client import SilentError
from spark_host.records import boot, proof
from spark_host.rollout import rollout, steps
from spark_host.rollout.record import Record
from spark_host.rollout.rollback import plan_rollback


def faulty(model: Model, name: str, fault: str, *calls: str, times: int = 1) -> Rollout:
    """Deploy a release with a fault at the first calls of these names."""
    model.troubles = {call: [fault] * times for call in calls}
    model.deploy(name)
    model.troubles = {}
    return model.outcome(name)


@pytest.fixture
def model() -> Model:
    """A host that serves A."""
    made = Model()
    made.deploy(A)
    return made


def test_a_first_release_that_cannot_be_enabled_is_not_what_a_start_would_take() -> None:
    model = Model()
    result = faulty(model, B, "fail", "enable")
    assert (result.state, result.failed_phase) == ("failed-no-previous", "enable")
    assert "did not answer" in str(result.reason)
    assert (model.engines, boot.enabled("main", model.host())) == ({}, [])
    assert boot.good("main", model.host()).release is None
    with pytest.raises(HostToolError, match="no proven release to start"):
        boot.start_service("main", model.host())


def test_a_release_that_cannot_be_enabled_leaves_the_old_one_good_and_no_way_back_to_itself(
    model: Model,
) -> None:
    result = faulty(model, B, "fail", "enable")
    assert (result.state, result.failed_phase) == ("rolled-back", "enable")
    assert model.serves() == A
    assert boot.enabled("main", model.host()) == [A]
    good = boot.good("main", model.host())
    assert (good.release, good.previous) == (A, ())
    assert "nothing to go back to" in str(plan_rollback("main", None, model.host()).problem)


def test_an_old_engine_that_cannot_be_stopped_serves_on_and_nothing_is_started_beside_it(
    model: Model,
) -> None:
    result = faulty(model, B, "fail", "stop")
    assert (result.state, result.failed_phase) == ("rolled-back", "stop")
    assert str(result.reason).startswith(f"systemctl stop {SERVE.of(A)}: did not answer")
    assert "start" not in result.times_s
    assert (result.serving, model.serves()) == (A, A)
    assert boot.enabled("main", model.host()) == [A]
    assert boot.good("main", model.host()).release == A


@pytest.mark.parametrize("phase", ["stop", "start"])
def test_the_log_of_a_candidates_earlier_run_is_not_told_as_that_of_this_change(
    model: Model, phase: str
) -> None:
    if phase == "start":
        model.broken[B] = "dies"
    result = faulty(model, B, "fail", *(["stop"] if phase == "stop" else []))
    assert result.failed_phase == phase
    assert result.log_tail == (() if phase == "stop" else ("what its last run said",))


@pytest.mark.parametrize("fails", [True, False])
def test_a_change_killed_while_it_enables_goes_back_when_that_fails_again(
    model: Model, fails: bool
) -> None:
    model.troubles = {"enable": ["kill before", *(["fail"] if fails else [])]}
    model.deploy(B)
    result, serves = model.outcome(B), A if fails else B
    assert (result.state, result.serving) == ("rolled-back" if fails else "switched", serves)
    assert result.failed_phase == ("enable" if fails else None)
    if fails:
        assert "was killed in phase enable; and then: systemctl enable" in str(result.reason)
    assert model.serves() == serves
    assert boot.enabled("main", model.host()) == [serves]
    assert boot.good("main", model.host()).release == serves


def test_a_good_record_from_before_the_trial_stays_whatever_the_clock_did(model: Model) -> None:
    host = model.host()
    host.disk.write(host.paths.good("main"), Good(A, (), "999999999"))  # then it stepped back
    model.upgrade()
    model.broken = {A: "full"}

    model.deploy(A)

    assert model.outcome(A).state == "failed-no-previous"

    assert boot.good("main", host).release == A
    assert boot.enabled("main", host) == [A]


def test_a_candidate_that_cannot_be_stopped_is_at_least_reached_by_nobody(model: Model) -> None:
    model.troubles = {"enable": ["fail"], "stop": ["", "fail"]}

    model.deploy(B)

    assert model.outcome(B).state == "rollback-failed"
    assert list(model.engines) == [B]
    assert model.open_to is None


def test_a_gateway_that_cannot_have_its_port_fails_a_first_change_in_phase_open() -> None:
    model = Model()
    result = faulty(model, B, "fail", "bring up")
    assert (result.state, result.failed_phase) == ("failed-no-previous", "open")
    assert "gateway: did not answer" in str(result.reason)
    assert (model.engines, boot.enabled("main", model.host())) == ({}, [])
    assert boot.good("main", model.host()).release is None


@pytest.mark.parametrize(("times", "state"), [(1, "rolled-back"), (2, "rollback-failed")])
def test_a_gateway_that_cannot_have_its_port_leaves_the_old_release_running_and_good(
    model: Model, times: int, state: str
) -> None:
    result = faulty(model, B, "fail", "bring up", times=times)
    assert (result.state, result.failed_phase) == (state, "open")
    assert str(result.reason).count("gateway: did not answer") == times
    assert (result.serving, list(model.engines)) == (A, [A])
    assert boot.enabled("main", model.host()) == [A]
    assert boot.good("main", model.host()).release == A


def test_a_step_that_the_system_refuses_is_the_reason_of_the_way_back(model: Model) -> None:
    result = faulty(model, B, "fail", "open")
    assert (result.state, result.failed_phase) == ("rolled-back", "open")
    assert "I/O error" in str(result.reason)
    assert model.serves() == A


def test_a_server_that_runs_and_is_proven_is_not_stopped_for_its_gateway(model: Model) -> None:
    result = faulty(model, A, "fail", "bring up", times=9)
    assert (result.state, result.failed_phase) == ("refused", "open")
    assert "gateway: did not answer" in str(result.reason)
    assert (result.serving, model.serves()) == (A, A)


def test_a_server_proven_anew_is_not_stopped_when_that_was_killed_and_its_gateway_fails(
    model: Model,
) -> None:
    model.deploy(B)
    model.troubles = {"bring up": ["kill before", "fail"]}
    model.deploy(B)
    result = model.outcome(B)
    assert (result.state, result.serving) == ("refused", B)
    assert "was killed in phase open; and then: " in str(result.reason)
    assert model.serves() == B


@pytest.mark.parametrize("fault", ["kill after", "fail", "full"])
def test_a_server_that_is_only_proven_anew_is_not_left_for_an_older_one(
    model: Model, fault: str
) -> None:
    model.deploy(B)
    model.upgrade()
    faulty(model, B, fault, "full check")
    assert model.serves() == B
    assert boot.enabled("main", model.host()) == [B]


def test_a_change_that_ended_well_is_not_undone_for_a_record_that_did_not_fit(
    model: Model,
) -> None:
    model.deploy(B)
    model.stop(SERVE.of(B))
    faulty(model, B, "full", "full check")
    assert model.serves() == B


def test_a_power_cut_between_two_links_does_not_refuse_the_next_change(model: Model) -> None:
    faulty(model, B, "cut after", "enable")
    assert boot.enabled("main", model.host()) == [A, B]
    assert model.serves() == A
    model.deploy(B)
    assert (model.outcome(B).state, model.serves()) == ("switched", B)


def test_a_first_release_boots_before_it_is_called_good() -> None:
    model = Model()
    faulty(model, B, "cut after", "enable")
    assert model.serves() == B
    model.deploy(A)  # which finds a link that no record of good speaks of
    assert model.serves() == A


def test_the_only_good_release_still_boots_after_it_was_stopped_in_a_change(model: Model) -> None:
    model.boot()
    faulty(model, A, "stop", "gateway")
    assert boot.enabled("main", model.host()) == [A]
    boot.start_service("main", model.host())
    model.boot()
    assert model.serves() == A


@pytest.mark.parametrize("times", [0, 1])
def test_a_change_killed_after_its_proof_is_finished_or_else_undone(
    model: Model, times: int
) -> None:
    model.troubles = {"bring up": ["kill before", *["fail"] * times]}
    model.deploy(B)
    result, serves = model.outcome(B), [B, A][times]
    assert (result.state, result.serving) == (["switched", "rolled-back"][times], serves)
    assert model.serves() == serves
    assert ("gateway: did not answer" in str(result.reason)) == bool(times)


@pytest.mark.parametrize(("began", "ok"), [("000000000", False), ("999999999", True)])
def test_a_failed_trial_keeps_no_proof_of_its_own_and_leaves_earlier_ones(
    model: Model, began: str, ok: bool
) -> None:
    host = model.host()
    trial = Record(release_of(A), host)
    trial.data = replace(trial.data, started_at=began, failed_phase="start", reason="it died")
    before = proof.read(A, host)
    assert before is not None
    rollout.roll_back(release_of(A), None, host, trial)
    assert proof.read(A, host) == replace(before, ok=ok)
    assert trial.data.state == "failed-no-previous"


def test_an_engine_too_busy_for_its_metrics_is_waited_for_as_long_as_a_drain_may_take(
    model: Model,
) -> None:
    answers = iter([SilentError("late"), 3.0, SilentError("late"), 0.0])

    class Busy(MemoryEngines):
        def unfinished(self, *_: object) -> float:
            answer = next(answers)
            if isinstance(answer, SilentError):
                raise answer
            return answer

    host = replace(model.host(), engines=Busy(model))
    old = release_of(A)
    old = replace(old, timeouts=replace(old.timeouts, drain_s=30))
    steps.drain(old, host, Record(old, host))
    assert list(answers) == []


def test_nobody_new_is_let_in_while_the_old_engine_ends_its_answers(model: Model) -> None:
    seen: list[str | None] = []

    class Asked(MemoryEngines):
        def unfinished(self, *_: object) -> float:
            seen.append(self.model.open_to)
            return 0.0

    rollout.roll_out(B, replace(known(model, B).host(), engines=Asked(model)))
    assert seen == [None]


def known(model: Model, name: str) -> Model:
    model.known.add(name)
    return model


def test_a_disk_that_fills_up_in_a_change_leaves_the_old_release_serving(
    model: Model, capfd: pytest.CaptureFixture[str]
) -> None:
    model.troubles = {"unfinished": ["full"]}
    model.deploy(B)
    assert model.serves() == A
    assert boot.enabled("main", model.host()) == [A]
    assert boot.good("main", model.host()).release == A
    said = capfd.readouterr().out
    assert f"rolled-back: serving {A}; [Errno 28] No space left on device: " in said


def test_a_change_on_a_full_disk_is_refused_before_anything_is_touched(
    model: Model, capfd: pytest.CaptureFixture[str]
) -> None:
    model.troubles = {"begin": ["full"]}
    engines = dict(model.engines)
    model.deploy(B)
    assert (model.engines, model.serves()) == (engines, A)
    said = capfd.readouterr().out
    assert f"refused: serving {A}; /var/lib/spark/switch/{B}.json: cannot be written: No sp" in said
    assert "fix: free space" in said


def test_a_speed_that_cannot_be_kept_undoes_no_change(model: Model) -> None:
    release, host = release_of(A), model.host()
    measured = replace(release, check=replace(release.check, bench=Bench(1.0, 15.0)))
    record = Record(measured, host)
    steps.activate(measured, host, record)
    assert "no speed was measured: [Errno 28] No space left on device" in record.data.bench[0]
    assert model.serves() == A


def test_what_a_right_server_may_show_is_told_of_a_change_that_is_done() -> None:
    model = Model()
    model.doubts = "two texts"
    model.deploy(A)
    told = model.outcome(A)
    assert (told.state, told.serving, told.warnings) == ("switched", A, ("repeat: two texts",))
    assert (told.reason, told.failed_phase) == (None, None)


@pytest.mark.parametrize("troubles", [{}, {"stop": ["fail"]}, {"disable": ["fail"]}])
def test_a_service_that_is_retired_neither_runs_nor_boots_though_the_first_try_failed(
    model: Model, troubles: dict[str, list[str]]
) -> None:
    model.troubles = dict(troubles)
    if troubles:
        with pytest.raises(HostToolError):
            boot.retire_service("main", model.host())
        # By this the next run sees that it is not done.
        assert model.engines or boot.enabled("main", model.host())
        model.troubles = {}
    assert boot.retire_service("main", model.host()) == 0
    assert (model.engines, boot.enabled("main", model.host())) == ({}, [])
    assert boot.good("main", model.host()).release is None
