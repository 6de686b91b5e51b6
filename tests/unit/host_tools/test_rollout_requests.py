import json
from dataclasses import replace

import pytest
from simulated_host import A, B, SimulatedHost
from simulated_ports import release_of
from spark_contract import documents
from spark_contract.records import Stopped
from spark_contract.status import NamedRelease, Rollback, RunningRollout, StartedRollout
from spark_contract.tool import HostToolError
from spark_contract.units import SCHEDULED_START_TIMER, SERVE, SWITCH
from spark_host.records import boot
from spark_host.rollout import record, rollout

C = f"main-{'c' * 12}"
RUN = "this-run"


@pytest.fixture
def sim():
    return SimulatedHost(releases={A, B, C})


def begin(sim):
    return record.begin(A, sim.host())


def poll(sim, begun):
    return record.poll(A, sim.host(), begun.request)


def run_unit(sim):
    unit = sim.unit(SWITCH.unit(A))
    unit.state, unit.run = "activating", RUN


def write_record(sim, **values):
    data = record.Record(release_of(A), sim.host(RUN)).data
    sim.documents[sim.paths.rollout(A)] = replace(data, **{"state": "switched", **values})


def test_new_rollout_removes_the_previous_record(sim):
    write_record(sim)
    begun = begin(sim)
    assert sim.paths.rollout(A) not in sim.documents
    assert sim.queued == [A]
    run_unit(sim)
    assert poll(sim, begun).state == "none"


@pytest.mark.parametrize(
    "stale",
    [{"release": B}, {"request": "older"}, {"request": None}, {"invocation_id": "earlier run"}],
)
def test_record_of_an_earlier_rollout_is_ignored(sim, stale):
    begun = begin(sim)
    run_unit(sim)
    write_record(sim)
    assert poll(sim, begun).state == "switched"
    assert sim.outcome(A).invocation_id == RUN
    write_record(sim, **stale)
    assert poll(sim, begun).state == "none"


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ("", f"{SWITCH.unit(A)} did not run (exit-code)"),
        (
            "run",
            "rollout of main: another rollout of this service is running; fix: wait until it ends",
        ),
    ],
)
def test_rollout_that_wrote_no_record_has_failed(sim, run, reason):
    begun = begin(sim)
    write_record(sim, request="older")
    unit = sim.unit(SWITCH.unit(A))
    unit.state, unit.result, unit.run = "failed", "exit-code", run
    sim.journal = [f"error: {reason}", "phase=none"] if run else []
    result = poll(sim, begun)
    assert (result.state, result.reason) == ("not-started", reason)


def test_queued_rollout_does_not_count_as_failed(sim):
    begun = begin(sim)
    sim.unit(SWITCH.unit(A)).sub = "start"
    assert poll(sim, begun).state == "none"


def test_repeated_request_joins_the_running_rollout(sim):
    first = begin(sim)
    run_unit(sim)
    write_record(sim, state="running")
    sim.queued.clear()
    second = begin(sim)
    assert (second.joined, second.request) == (True, first.request)
    assert sim.queued == []
    assert poll(sim, second).state == "running"


def test_simultaneous_requests_start_one_rollout(sim, monkeypatch):
    host, requests = sim.host(), []

    def request_again():
        monkeypatch.undo()
        try:
            requests.append(begin(sim))
        except BlockingIOError:  # it waits for the lock
            requests.append(None)

    monkeypatch.setattr(host.units, "reload", request_again)
    first = record.begin(A, host)
    run_unit(sim)
    second = requests[0] or begin(sim)
    write_record(sim, state="running")
    assert [poll(sim, each).state for each in (first, second)] == ["running", "running"]


def test_killed_rollout_counts_as_interrupted(sim):
    begun = begin(sim)
    write_record(sim, state="running")
    assert poll(sim, begun).state == "interrupted"


def test_rollout_is_running_if_its_unit_is_active_and_its_record_is_unfinished(sim):
    def running():
        host = sim.host()
        unit = host.units.state(SWITCH.unit(A), "ActiveState", "Job")
        return record.running_rollout(A, unit, host)

    begin(sim)
    requested = RunningRollout(A, sim.documents[sim.paths.request(A)].at, None)
    assert running() is None
    run_unit(sim)
    assert running() == requested
    write_record(sim, state="running", phase="start", started_at="then")
    assert running() == RunningRollout(A, "then", "start")
    write_record(sim, state="switched", phase="done")
    assert running() is None
    write_record(sim, state="running", invocation_id="earlier run", phase="drain")
    assert running() == requested


@pytest.mark.parametrize("other", [{"invocation_id": "earlier run"}, {"boot_id": "boot-0"}])
def test_rollout_is_recovered_only_by_the_run_that_started_it(sim, other):
    write_record(sim, state="running", phase="start", **other)
    sim.calls = 0
    assert rollout.recover(A, sim.host(RUN)) == 0
    assert sim.outcome(A).state == "running"
    assert sim.calls == 0


def test_error_is_raised_if_the_rollout_unit_cannot_start(sim):
    sim.faults_at = {"begin": ["fail"]}
    with pytest.raises(HostToolError, match=f"systemctl start {SWITCH.unit(A)}: did not answer"):
        begin(sim)


def make_good(sim, *names):
    for name in names:
        sim.proven.add(name)
        boot.enable_only(release_of(name), sim.host())


def named(name):
    return NamedRelease(name, "lab-stub", "v2")


def plan(sim, target=None):
    return rollout.plan_rollback("main", target, sim.host())


def refusal(sim, target=None):
    problem = plan(sim, target).problem
    return f"{problem.where}: {problem.what}; {problem.fix}"


def test_rollback_targets_the_previous_or_a_named_release(sim):
    make_good(sim, A)
    assert "no earlier proven release" in refusal(sim)
    make_good(sim, B, C)
    assert plan(sim) == Rollback(named(C), named(B))
    assert plan(sim, A) == Rollback(named(C), named(A))


def test_rollback_to_a_missing_release_lists_available_releases(sim):
    make_good(sim, A, B)
    sim.releases.discard(C)
    present = f"{A} (lab-stub with v2); {B} (lab-stub with v2)"
    assert f"{C}: no such release on this host (available: {present})" in refusal(sim, C)


def test_rollback_to_an_incomplete_release_names_a_complete_release(sim):
    make_good(sim, A, B, C)
    sim.incomplete = {B}
    message = refusal(sim)
    assert message.startswith(f"{B}: tree of {B}: has no receipt")
    assert f"use a complete release ({A} (lab-stub with v2)), or" in message
    assert "model: lab-stub and profile: v2" in message
    sim.incomplete = {A, B}
    assert "use a complete release" not in refusal(sim)


def test_stopped_service_is_not_rolled_back(sim):
    make_good(sim, A, B)
    sim.documents[sim.paths.stopped("main")] = Stopped(B, "now")
    assert "stopped on purpose" in refusal(sim)


def test_second_rollback_does_not_return_to_the_first_release(sim):
    make_good(sim, A, B)
    boot.record_rollback("main", A, sim.host())
    make_good(sim, A)
    assert f"{A} replaced {B}" in str(plan(sim).done)
    note = boot.last_rollback("main", sim.host())
    assert note.from_release == B
    assert plan(sim, B).to == named(B), "a named release can be reached"


@pytest.mark.parametrize("next_good", [B, C], ids=["failed rollback", "next rollout"])
def test_new_known_good_release_cancels_the_rollback(sim, next_good):
    make_good(sim, A, B)
    boot.record_rollback("main", A, sim.host())
    make_good(sim, *([A] if next_good == C else []), next_good)
    assert boot.last_rollback("main", sim.host()) is None
    assert plan(sim).to == named(A)


def test_rollback_dry_run_changes_nothing(sim, capsys):
    make_good(sim, A, B)
    assert rollout.rollback(["main", "--dry"], sim.host()) == 0
    assert json.loads(capsys.readouterr().out)["to"]["name"] == A
    assert sim.queued == []
    assert sim.paths.rollback("main") not in sim.documents

    assert rollout.rollback(["main"], sim.host()) == 0
    assert sim.queued == [A]
    begun = documents.parse(StartedRollout, capsys.readouterr().out)
    assert (begun.release, begun.joined) == (A, False)
    assert (begun.from_release, begun.to) == (named(B), named(A))


@pytest.mark.parametrize("words", [[], ["--dry"], ["main", "--to"], ["main", "--too", A]])
def test_rollback_with_invalid_arguments_starts_no_rollout(sim, words):
    make_good(sim, A, B)
    with pytest.raises(HostToolError) as error:
        rollout.rollback(words, sim.host())
    assert error.value.exit_code == 2
    assert sim.queued == []


TIMER = SCHEDULED_START_TIMER.unit("main")


def test_second_stop_keeps_the_name_of_the_first_user(sim):
    make_good(sim, A)
    boot.stop_service("main", "ann@desk", sim.host())
    first = sim.documents[sim.paths.stopped("main")]
    boot.stop_service("main", "ben@laptop", sim.host())
    assert sim.documents[sim.paths.stopped("main")] == first
    assert (first.by, first.release) == ("ann@desk", A)


def test_stop_also_stops_a_release_that_starts_meanwhile(sim, monkeypatch):
    make_good(sim, A)
    host = sim.host()
    locked = host.disk.locked

    def lock_late(path, **options):
        sim.stop(SERVE.unit(A))
        sim.start(SERVE.unit(B))  # a rollout
        return locked(path, **options)

    monkeypatch.setattr(host.disk, "locked", lock_late)
    boot.stop_service("main", "ann", host)
    sim.settle()
    assert boot.active_release("main", sim.host()) is None


def test_timed_stop_ends_and_removes_its_timer(sim):
    make_good(sim, A)
    boot.stop_service("main", "ann", sim.host(), 3600)
    assert TIMER in sim.links
    boot.start_when_due("main", sim.host())
    assert boot.is_stopped("main", sim.host()), "the hour is not over"
    sim.pass_time(3601)
    boot.start_when_due("main", sim.host())
    assert boot.active_release("main", sim.host()) == A
    assert not boot.is_stopped("main", sim.host())
    assert TIMER not in sim.links


def test_timed_stop_still_ends_after_a_power_cut(sim):
    make_good(sim, A)
    sim.history.clear()
    boot.stop_service("main", "ann", sim.host(), 60)
    calls = [line.partition(" ")[2] for line in sim.history]
    assert calls.index("enable") < calls.index("write stopped"), "timer first"


def test_timed_stop_still_ends_if_its_timer_elapses_during_the_stop(sim, monkeypatch):
    make_good(sim, A)
    host, waiting = sim.host(), []
    start = host.units.start_in_background

    def start_and_elapse(unit):
        start(unit)
        try:
            boot.start_when_due("main", sim.host())
        except BlockingIOError:  # it waits for the lock
            waiting.append(unit)

    monkeypatch.setattr(host.units, "start_in_background", start_and_elapse)
    boot.stop_service("main", "ann", host, 60)
    for _ in waiting:
        boot.start_when_due("main", sim.host())
    assert boot.is_stopped("main", sim.host())
    assert TIMER in sim.links


@pytest.mark.parametrize("stops", [True, False], ids=["permanent stop", "manual start"])
def test_start_or_permanent_stop_replaces_a_timed_stop(sim, stops):
    make_good(sim, A)
    boot.stop_service("main", "ann", sim.host(), 60)
    if stops:
        boot.stop_service("main", "ben", sim.host())
    else:
        boot.start_service("main", sim.host())
    assert TIMER not in sim.links
    sim.pass_time(3600)
    assert boot.start_when_due("main", sim.host()) == 0
    assert boot.is_stopped("main", sim.host()) == stops
    assert boot.active_release("main", sim.host()) == (None if stops else A)
