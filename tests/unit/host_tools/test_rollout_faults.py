from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulated_host import A, B, SimulatedHost
from simulated_ports import Disk, Engines, release_of
from spark_contract.records import KnownGoodReleases
from spark_contract.release import Bench
from spark_contract.tool import HostToolError
from spark_contract.units import SERVE
from spark_host.engine.client import EngineTimeoutError
from spark_host.records import boot
from spark_host.rollout import rollout, steps
from spark_host.rollout.record import Record

C = f"main-{'c' * 12}"
FAULTS = ("kill before", "kill after", "cut before", "cut after", "reboot", "fail", "late", "hang",
          "full", "dies", "stop", "again", "other")  # fmt: skip


@dataclass(frozen=True)
class Story:
    before: tuple[str, ...] = ()
    target: str = B
    broken: str = ""
    event: str = ""

    def begin(self):
        sim = SimulatedHost()
        for name in self.before:
            sim.deploy(name)
        if self.broken:
            sim.broken[self.target] = self.broken
        if self.event == "upgrade":
            sim.upgrade()
        elif self.event == "boot":
            sim.boot()
        sim.calls = 0
        sim.history.clear()
        return sim


STORIES = {
    "first release": Story(),
    **{f"first release fails: {step}": Story(broken=step) for step in ("dies", "quick", "full")},
    "new release": Story((A,)),
    **{f"new release fails: {step}": Story((A,), broken=step)
       for step in ("dies", "quick", "full", "hangs")},
    "rollback": Story((A, B), target=A),
    "same release again": Story((A,), target=A),
    "only release, broken by an upgrade": Story((A,), target=A, event="upgrade", broken="full"),
    "same release after a boot": Story((A,), target=A, event="boot"),
    "same release after an upgrade": Story((B, A), target=A, event="upgrade"),
    "same release, broken by an upgrade": Story((B, A), target=A, event="upgrade", broken="full"),
    "new release after an upgrade": Story((A,), event="upgrade"),
}  # fmt: skip


def assert_recovers(sim, story):
    sim.faults.clear()
    sim.calls_of_first = sim.calls
    sim.disk_full = False
    sim.settle()
    sim.check_invariants()
    if boot.is_stopped("main", sim.host()):
        try:
            boot.start_service("main", sim.host())
        except HostToolError:
            assert not sim.known_good()
    sim.deploy(story.target)
    if story.target not in sim.broken:
        assert sim.outcome(story.target).state == "switched"
        assert sim.serving() == story.target
    else:
        assert sim.serving() != story.target
        assert sim.known_good() != story.target or sim.serving() is None
    other = A if story.target == B else B
    sim.deploy(other)
    assert sim.outcome(other).state == "switched"
    assert sim.serving() == other
    assert sim.enabled() == [other]
    sim.boot()
    assert sim.serving() == other


def run_story(story, faults, then=()):
    sim = story.begin()
    served = sim.serving()
    sim.faults = dict(faults)
    try:
        sim.deploy(story.target)
        for step in then:
            if step == "boot":
                sim.boot()
            elif step == "upgrade":
                sim.upgrade()
            else:
                sim.deploy(step)
        is_single = len(faults) == 1 and not then and "stop" not in faults.values()
        if served and is_single and not story.broken:
            sim.settle()
            assert sim.serving(), "a single fault stopped the service"
            if story.target == served:
                assert sim.serving() == served, "a single fault stopped a release that serves"
        assert_recovers(sim, story)
    except AssertionError as error:
        lines = "\n".join(sim.history[-80:])
        raise AssertionError(f"{error}\n{story} {faults} {then}\n{lines}") from error
    return sim


def run_with_faults(name, faults):
    story = STORIES[name]
    calls = run_story(story, {}).calls_of_first
    for number in range(1, calls + 1):
        for fault in faults:
            run_story(story, {number: fault})


def test_rollout_of_a_new_release_survives_a_fault_at_every_call():
    run_with_faults("new release", ("kill after", "cut after", "fail"))


@pytest.mark.slow
@pytest.mark.parametrize("name", STORIES)
def test_rollout_survives_a_fault_at_every_call(name):
    run_with_faults(name, FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first release", "new release", "rollback"])
def test_rollout_survives_two_kills_at_every_call(name):
    story = STORIES[name]
    calls = run_story(story, {}).calls_of_first
    for number in range(1, calls + 1):
        for later in range(1, 30, 3):
            run_story(story, {number: "kill after", number + later: "kill before"})


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    story=st.sampled_from(list(STORIES.values())),
    faults=st.dictionaries(st.integers(1, 120), st.sampled_from(FAULTS), max_size=6),
    then=st.lists(st.sampled_from((A, B, "boot", "upgrade")), max_size=3),
)
@example(STORIES["first release"], {29: "dies", 30: "hang"}, [])  # between proof and open traffic
@example(STORIES["new release"], {40: "fail", 48: "fail", 78: "kill after"}, [A])
@example(STORIES["same release again"], {64: "fail", 77: "fail", 120: "fail"}, [B, A])
def test_any_sequence_of_faults_ends_with_a_proven_release(story, faults, then):
    run_story(story, faults, then)


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
def test_old_release_is_kept_after_a_late_failure(sim, call, phase, reason):
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
def test_reported_log_tail_never_shows_an_earlier_run(sim, phase):
    if phase == "start":
        sim.broken[B] = "dies"
    result = deploy(sim, B, stop=["fail"] if phase == "stop" else [])
    assert result.failed_phase == phase
    assert result.log_tail == (() if phase == "stop" else tuple(sim.journal))


@pytest.mark.parametrize("call", ["enable", "bring up"])
@pytest.mark.parametrize("fails_again", [True, False])
def test_killed_rollout_that_has_its_proof_is_finished_or_rolled_back(sim, call, fails_again):
    result = deploy(sim, B, **{call: ["kill before", *["fail"] * fails_again]})
    serving = A if fails_again else B
    state = "rolled-back" if fails_again else "switched"
    assert (result.state, result.serving) == (state, serving)
    assert (result.failed_phase is not None) == fails_again
    assert ("; finishing it failed: " in str(result.reason)) == fails_again
    assert_serves(sim, serving)


def test_killed_rollback_still_reports_why_the_rollout_failed(sim):
    sim.broken[B] = "full"
    result = deploy(sim, B, close=["", "kill before"])
    assert result.state == "rolled-back"
    assert "check answers: it is wrong" in str(result.reason)
    assert_serves(sim, A)


@pytest.mark.parametrize("then", [None, C], ids=["another process", "another rollout"])
def test_recovery_waits_for_a_process_that_has_taken_the_lock(sim, monkeypatch, then):
    locked, numbers = Disk.locked, count(1)

    def locked_by_another(disk, path, *, wait=False):
        if path == sim.paths.rollout_lock("main") and next(numbers) == 2:
            if not wait:
                raise BlockingIOError
            if then:
                sim.deploy(then)
        return locked(disk, path, wait=wait)

    monkeypatch.setattr(Disk, "locked", locked_by_another)
    result = deploy(sim, B, full_check=["kill before"])
    assert result.state == ("refused" if then else "rolled-back")
    assert "was killed in phase check" in str(result.reason)
    assert_serves(sim, then or A)


def test_known_good_record_survives_clock_steps(sim):
    host = sim.host()
    host.disk.write(host.paths.known_good("main"), KnownGoodReleases(A, (), "999999999"))
    sim.upgrade()
    sim.broken = {A: "full"}
    assert deploy(sim, A).state == "failed-no-previous"
    assert (sim.known_good(), sim.enabled()) == (A, [A])


def test_candidate_that_cannot_be_stopped_never_gets_traffic(sim):
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
def test_gateway_failure_does_not_stop_an_engine_that_passed_its_check(sim, faults, reason):
    result = deploy(sim, A, bring_up=faults)
    assert (result.state, result.failed_phase, result.serving) == ("refused", "open", A)
    assert reason in str(result.reason)
    assert_serves(sim, A)


def test_rollout_succeeds_even_if_its_record_cannot_be_written(sim):
    deploy(sim, B)
    sim.stop(SERVE.unit(B))
    deploy(sim, B, full_check=["full"])
    assert sim.serving() == B


@pytest.mark.parametrize(("phase", "ok"), [("start", False), ("stop", True)])
def test_failed_candidate_does_not_invalidate_other_proofs(sim, phase, ok):
    host = sim.host()
    record = Record(release_of(A), host)
    record.data = replace(record.data, started_at="999999999", failed_phase=phase, reason="it died")
    before = boot.read_proof(A, host)
    assert before is not None
    rollout.roll_back(release_of(A), None, host, record)
    assert boot.read_proof(A, host) == replace(before, ok=ok)
    assert record.data.state == "failed-no-previous"


def test_busy_engine_gets_no_new_requests_while_it_drains(sim):
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


def test_old_release_is_kept_if_the_disk_fills_up(sim, capfd):
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


def test_rollout_succeeds_even_if_the_speed_cannot_be_saved(sim):
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
def test_retired_service_is_stopped_and_does_not_start_at_boot(sim, call):
    if call:
        sim.faults_at = {call: ["fail"]}
        with pytest.raises(HostToolError):
            boot.retire_service("main", sim.host())
        assert sim.engines or sim.enabled(), "the next run must notice that it is not done"
    assert boot.retire_service("main", sim.host()) == 0
    assert_serves_nothing(sim)
