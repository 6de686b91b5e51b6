"""Reports of failed rollouts: a candidate that fails late is rolled back and is not good.

Faults at every call are in `test_rollout_histories.py`.
"""

from dataclasses import replace
from typing import Any

import pytest
from simulated_host import A, B, SimulatedHost
from simulated_ports import Engines, release_of
from spark_contract.records import KnownGoodReleases
from spark_contract.release import Bench
from spark_contract.tool import HostToolError
from spark_contract.units import SERVE
from spark_host.engine.client import EngineTimeoutError
from spark_host.records import boot
from spark_host.rollout import rollout, steps
from spark_host.rollout.record import Record


def deploy(sim, name, **faults_at):
    sim.faults_at = {call.replace("_", " "): faults for call, faults in faults_at.items()}
    sim.deploy(name)
    sim.faults_at = {}
    return sim.outcome(name)


def assert_serves(sim, name):
    assert (sim.serving(), sim.enabled(), sim.known_good()) == (name, [name], name)


def assert_serves_nothing(sim):
    assert (sim.engines, sim.enabled(), sim.known_good()) == ({}, [], None)


@pytest.fixture
def sim():
    sim = SimulatedHost()
    sim.deploy(A)
    return sim


@pytest.mark.parametrize(("call", "phase"), [("enable", "enable"), ("bring up", "open")])
def test_first_release_that_fails_late_is_not_known_good(call, phase):
    sim = SimulatedHost()
    result = deploy(sim, B, **{call: ["fail"]})
    assert (result.state, result.failed_phase) == ("failed-no-previous", phase)
    assert "did not answer" in str(result.reason)
    assert_serves_nothing(sim)
    with pytest.raises(HostToolError, match="no proven release"):
        boot.start_service("main", sim.host())


@pytest.mark.parametrize(
    ("call", "phase", "reason"),
    [
        ("enable", "enable", f"enable {SERVE.unit(B)}: did not answer"),
        ("stop", "stop", f"systemctl stop {SERVE.unit(A)}: did not answer"),
        ("open", "open", "I/O error"),
        ("bring up", "open", "gateway: did not answer"),
    ],
)
def test_late_failure_keeps_the_old_release(sim, call, phase, reason):
    result = deploy(sim, B, **{call: ["fail"]})
    assert (result.state, result.failed_phase, result.serving) == ("rolled-back", phase, A)
    assert reason in str(result.reason)
    assert ("start" in result.times_s) == (phase != "stop")
    assert_serves(sim, A)
    assert boot.read_known_good("main", sim.host()).previous == ()


def test_failed_rollback_reports_both_reasons(sim):
    result = deploy(sim, B, bring_up=["fail", "fail"])
    assert (result.state, result.failed_phase, result.serving) == ("rollback-failed", "open", A)
    assert str(result.reason).count("gateway: did not answer") == 2
    assert (list(sim.engines), sim.enabled(), sim.known_good()) == ([A], [A], A)


@pytest.mark.parametrize("phase", ["stop", "start"])
def test_log_tail_is_not_from_an_earlier_run(sim, phase):
    if phase == "start":
        sim.broken[B] = "dies"
    result = deploy(sim, B, stop=["fail"] if phase == "stop" else [])
    assert result.failed_phase == phase
    assert result.log_tail == (() if phase == "stop" else tuple(sim.journal))


@pytest.mark.parametrize("call", ["enable", "bring up"])
@pytest.mark.parametrize("fails_again", [True, False])
def test_rollout_killed_after_the_proof_is_finished_or_rolled_back(sim, call, fails_again):
    result = deploy(sim, B, **{call: ["kill before", *["fail"] * fails_again]})
    serving = A if fails_again else B
    state = "rolled-back" if fails_again else "switched"
    assert (result.state, result.serving) == (state, serving)
    assert (result.failed_phase is not None) == fails_again
    assert ("; finishing it failed: " in str(result.reason)) == fails_again
    assert_serves(sim, serving)


def test_known_good_record_survives_clock_steps(sim):
    host = sim.host()
    host.disk.write(host.paths.known_good("main"), KnownGoodReleases(A, (), "999999999"))
    sim.upgrade()
    sim.broken = {A: "full"}
    assert deploy(sim, A).state == "failed-no-previous"
    assert (sim.known_good(), sim.enabled()) == (A, [A])


def test_unstoppable_candidate_never_gets_traffic(sim):
    result = deploy(sim, B, enable=["fail"], stop=["", "fail"])
    assert result.state == "rollback-failed"
    assert (list(sim.engines), sim.open_to) == ([B], None)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (["fail"] * 9, "gateway: did not answer"),
        (["kill before", "fail"], "was killed in phase open; finishing it failed: "),
    ],
)
def test_gateway_failure_does_not_stop_a_proven_engine(sim, faults, reason):
    result = deploy(sim, A, bring_up=faults)
    assert (result.state, result.failed_phase, result.serving) == ("refused", "open", A)
    assert reason in str(result.reason)
    assert_serves(sim, A)


@pytest.mark.parametrize("fault", ["kill after", "fail", "full"])
def test_rechecked_engine_is_not_rolled_back(sim, fault):
    deploy(sim, B)
    sim.upgrade()
    deploy(sim, B, full_check=[fault])
    assert_serves(sim, B)


def test_rollout_succeeds_even_if_its_record_cannot_be_written(sim):
    deploy(sim, B)
    sim.stop(SERVE.unit(B))
    deploy(sim, B, full_check=["full"])
    assert sim.serving() == B


def test_power_cut_between_two_links_allows_the_next_rollout(sim):
    sim.releases.add(B)
    sim.faults_at = {"enable": ["cut after"]}
    sim.deploy(B)
    assert (sim.enabled(), sim.serving()) == ([A, B], A)
    assert deploy(sim, B).state == "switched"
    assert sim.serving() == B


@pytest.mark.parametrize(("phase", "ok"), [("start", False), ("stop", True)])
def test_failed_candidate_loses_only_its_own_proof(sim, phase, ok):
    host = sim.host()
    record = Record(release_of(A), host)
    record.data = replace(record.data, started_at="999999999", failed_phase=phase, reason="it died")
    before = boot.read_proof(A, host)
    assert before is not None
    rollout.roll_back(release_of(A), None, host, record)
    assert boot.read_proof(A, host) == replace(before, ok=ok)
    assert record.data.state == "failed-no-previous"


def test_busy_engine_is_drained_without_new_requests(sim):
    answers: list[Any] = [EngineTimeoutError("late"), 3.0, EngineTimeoutError("late"), 0.0]
    open_to: list[str | None] = []

    class BusyEngines(Engines):
        def count_unfinished(self, *_):
            open_to.append(self.sim.open_to)
            answer = answers.pop(0)
            if isinstance(answer, EngineTimeoutError):
                raise answer
            return float(answer)

    host, old = replace(sim.host(), engines=BusyEngines(sim)), release_of(A)
    slow = replace(old, timeouts=replace(old.timeouts, drain_s=30))
    steps.drain(slow, host, Record(slow, host))
    assert answers == []
    answers, open_to = [0.0], []
    steps.replace_running(release_of(B), old, host, Record(release_of(B), host))
    assert open_to == [None]


def test_disk_that_fills_up_keeps_the_old_release(sim, capfd):
    sim.faults_at = {"unfinished": ["full"]}
    sim.deploy(B)
    assert_serves(sim, A)
    message = f"rolled-back: serving {A}; [Errno 28] No space left on device: "
    assert message in capfd.readouterr().out


def test_rollout_on_a_full_disk_is_rejected(sim, capfd):
    engines = dict(sim.engines)
    sim.faults_at = {"begin": ["full"]}
    sim.deploy(B)
    assert (sim.engines, sim.serving()) == (engines, A)
    output = capfd.readouterr().out
    assert f"refused: serving {A}; /var/lib/spark/switch/{B}.json: cannot be written: " in output
    assert "fix: free space" in output


def test_rollout_succeeds_if_the_speed_cannot_be_saved(sim):
    release, host = release_of(A), sim.host()
    release = replace(release, check=replace(release.check, bench=Bench(1.0, 15.0)))
    record = Record(release, host)
    steps.activate(release, host, record)
    assert "the speed was not measured: [Errno 28] No space left on device" in record.data.bench[0]
    assert sim.serving() == A


def test_warnings_are_reported_after_a_rollout():
    sim = SimulatedHost(warning="two texts")
    result = deploy(sim, A)
    assert (result.state, result.serving) == ("switched", A)
    assert result.warnings == ("repeat: two texts",)
    assert (result.reason, result.failed_phase) == (None, None)


@pytest.mark.parametrize("call", [None, "stop", "disable"])
def test_retired_service_neither_runs_nor_boots(sim, call):
    if call:
        sim.faults_at = {call: ["fail"]}
        with pytest.raises(HostToolError):
            boot.retire_service("main", sim.host())
        assert sim.engines or sim.enabled(), "the next run must notice that it is not done"
    assert boot.retire_service("main", sim.host()) == 0
    assert_serves_nothing(sim)
