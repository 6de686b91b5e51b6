"""A candidate whose last steps fail is rolled back, and is not good afterwards.

Faults at every call are in `test_rollout_histories.py`; these tests check the reports.
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
from spark_host.rollout.rollout import plan_rollback


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


def test_first_release_that_cannot_be_enabled_is_not_good() -> None:
    model = Model()
    result = faulty(model, B, "fail", "enable")
    assert (result.state, result.failed_phase) == ("failed-no-previous", "enable")
    assert "did not answer" in str(result.reason)
    assert (model.engines, boot.enabled("main", model.host())) == ({}, [])
    assert boot.good("main", model.host()).release is None
    with pytest.raises(HostToolError, match="no proven release to start"):
        boot.start_service("main", model.host())


def test_release_that_cannot_be_enabled_leaves_the_old_good(
    model: Model,
) -> None:
    result = faulty(model, B, "fail", "enable")
    assert (result.state, result.failed_phase) == ("rolled-back", "enable")
    assert model.serves() == A
    assert boot.enabled("main", model.host()) == [A]
    good = boot.good("main", model.host())
    assert (good.release, good.previous) == (A, ())
    assert "nothing to go back to" in str(plan_rollback("main", None, model.host()).problem)


def test_unstoppable_old_engine_keeps_serving(
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
def test_log_tail_is_not_of_an_earlier_run(model: Model, phase: str) -> None:
    if phase == "start":
        model.broken[B] = "dies"
    result = faulty(model, B, "fail", *(["stop"] if phase == "stop" else []))
    assert result.failed_phase == phase
    assert result.log_tail == (() if phase == "stop" else ("what its last run said",))


@pytest.mark.parametrize("fails", [True, False])
def test_killed_enable_is_rolled_back_if_it_fails_again(model: Model, fails: bool) -> None:
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


def test_earlier_good_record_survives_clock_steps(model: Model) -> None:
    host = model.host()
    host.disk.write(host.paths.good("main"), Good(A, (), "999999999"))  # then it stepped back
    model.upgrade()
    model.broken = {A: "full"}

    model.deploy(A)

    assert model.outcome(A).state == "failed-no-previous"

    assert boot.good("main", host).release == A
    assert boot.enabled("main", host) == [A]


def test_unstoppable_candidate_gets_no_traffic(model: Model) -> None:
    model.troubles = {"enable": ["fail"], "stop": ["", "fail"]}

    model.deploy(B)

    assert model.outcome(B).state == "rollback-failed"
    assert list(model.engines) == [B]
    assert model.open_to is None


def test_taken_port_fails_the_first_rollout_in_phase_open() -> None:
    model = Model()
    result = faulty(model, B, "fail", "bring up")
    assert (result.state, result.failed_phase) == ("failed-no-previous", "open")
    assert "gateway: did not answer" in str(result.reason)
    assert (model.engines, boot.enabled("main", model.host())) == ({}, [])
    assert boot.good("main", model.host()).release is None


@pytest.mark.parametrize(("times", "state"), [(1, "rolled-back"), (2, "rollback-failed")])
def test_taken_port_keeps_the_old_release(model: Model, times: int, state: str) -> None:
    result = faulty(model, B, "fail", "bring up", times=times)
    assert (result.state, result.failed_phase) == (state, "open")
    assert str(result.reason).count("gateway: did not answer") == times
    assert (result.serving, list(model.engines)) == (A, [A])
    assert boot.enabled("main", model.host()) == [A]
    assert boot.good("main", model.host()).release == A


def test_failed_step_is_the_reason_of_the_rollback(model: Model) -> None:
    result = faulty(model, B, "fail", "open")
    assert (result.state, result.failed_phase) == ("rolled-back", "open")
    assert "I/O error" in str(result.reason)
    assert model.serves() == A


def test_proven_engine_is_not_stopped_for_its_gateway(model: Model) -> None:
    result = faulty(model, A, "fail", "bring up", times=9)
    assert (result.state, result.failed_phase) == ("refused", "open")
    assert "gateway: did not answer" in str(result.reason)
    assert (result.serving, model.serves()) == (A, A)


def test_rechecked_engine_survives_kill_and_gateway_failure(
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
def test_rechecked_engine_is_not_rolled_back(model: Model, fault: str) -> None:
    model.deploy(B)
    model.upgrade()
    faulty(model, B, fault, "full check")
    assert model.serves() == B
    assert boot.enabled("main", model.host()) == [B]


def test_successful_rollout_survives_an_unwritten_record(
    model: Model,
) -> None:
    model.deploy(B)
    model.stop(SERVE.of(B))
    faulty(model, B, "full", "full check")
    assert model.serves() == B


def test_power_cut_between_two_links_allows_the_next_rollout(model: Model) -> None:
    faulty(model, B, "cut after", "enable")
    assert boot.enabled("main", model.host()) == [A, B]
    assert model.serves() == A
    model.deploy(B)
    assert (model.outcome(B).state, model.serves()) == ("switched", B)


def test_first_release_is_enabled_before_it_is_good() -> None:
    model = Model()
    faulty(model, B, "cut after", "enable")
    assert model.serves() == B
    model.deploy(A)  # which finds a link that no record of good speaks of
    assert model.serves() == A


def test_only_good_release_boots_after_a_killed_rollout(model: Model) -> None:
    model.boot()
    faulty(model, A, "stop", "gateway")
    assert boot.enabled("main", model.host()) == [A]
    boot.start_service("main", model.host())
    model.boot()
    assert model.serves() == A


@pytest.mark.parametrize("times", [0, 1])
def test_rollout_killed_after_the_proof_is_finished_or_rolled_back(
    model: Model, times: int
) -> None:
    model.troubles = {"bring up": ["kill before", *["fail"] * times]}
    model.deploy(B)
    result, serves = model.outcome(B), [B, A][times]
    assert (result.state, result.serving) == (["switched", "rolled-back"][times], serves)
    assert model.serves() == serves
    assert ("gateway: did not answer" in str(result.reason)) == bool(times)


@pytest.mark.parametrize(("began", "ok"), [("000000000", False), ("999999999", True)])
def test_failed_candidate_loses_only_its_own_proof(model: Model, began: str, ok: bool) -> None:
    host = model.host()
    trial = Record(release_of(A), host)
    trial.data = replace(trial.data, started_at=began, failed_phase="start", reason="it died")
    before = proof.read(A, host)
    assert before is not None
    rollout.roll_back(release_of(A), None, host, trial)
    assert proof.read(A, host) == replace(before, ok=ok)
    assert trial.data.state == "failed-no-previous"


def test_busy_engine_is_drained_up_to_the_limit(
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


def test_drain_accepts_no_new_requests(model: Model) -> None:
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


def test_disk_that_fills_up_keeps_the_old_release(
    model: Model, capfd: pytest.CaptureFixture[str]
) -> None:
    model.troubles = {"unfinished": ["full"]}
    model.deploy(B)
    assert model.serves() == A
    assert boot.enabled("main", model.host()) == [A]
    assert boot.good("main", model.host()).release == A
    said = capfd.readouterr().out
    assert f"rolled-back: serving {A}; [Errno 28] No space left on device: " in said


def test_rollout_on_a_full_disk_is_refused(model: Model, capfd: pytest.CaptureFixture[str]) -> None:
    model.troubles = {"begin": ["full"]}
    engines = dict(model.engines)
    model.deploy(B)
    assert (model.engines, model.serves()) == (engines, A)
    said = capfd.readouterr().out
    assert f"refused: serving {A}; /var/lib/spark/switch/{B}.json: cannot be written: No sp" in said
    assert "fix: free space" in said


def test_unwritable_speed_does_not_fail_the_rollout(model: Model) -> None:
    release, host = release_of(A), model.host()
    measured = replace(release, check=replace(release.check, bench=Bench(1.0, 15.0)))
    record = Record(measured, host)
    steps.activate(measured, host, record)
    assert "no speed was measured: [Errno 28] No space left on device" in record.data.bench[0]
    assert model.serves() == A


def test_warnings_are_reported_after_a_rollout() -> None:
    model = Model()
    model.doubts = "two texts"
    model.deploy(A)
    told = model.outcome(A)
    assert (told.state, told.serving, told.warnings) == ("switched", A, ("repeat: two texts",))
    assert (told.reason, told.failed_phase) == (None, None)


@pytest.mark.parametrize("troubles", [{}, {"stop": ["fail"]}, {"disable": ["fail"]}])
def test_retired_service_neither_runs_nor_boots(
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
