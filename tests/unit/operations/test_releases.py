import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spark_contract.documents import read, to_json
from spark_contract.records import Rollout
from spark_contract.status import KeepList, Pruning
from spark_contract.tool import HOST_TOOL

from spark_deploy.hosts import commands, releases, serve
from spark_deploy.hosts.operations import HostError
from spark_deploy.hosts.status import PrunePreview, RollbackPreview
from spark_deploy.hosts.uninstall import prune_host
from tests.unit.facts.test_tool_answers import PROVEN, RELEASE
from tests.unit.operations.fake_host import Failed, FakeHost, on, run_operation
from tests.unit.statuses import host_status

FORMER = {"name": "main-aaaaaaaaaaaa", "model": "m", "profile": "v2"}
CURRENT = {"name": "main-bbbbbbbbbbbb", "model": "m", "profile": "v2-tq"}
NEW, OLD = "main-bbbbbbbbbbbb", "main-aaaaaaaaaaaa"
KEEP = KeepList(2, (), (), (), "/m", "/s", "/c")


def after_failure(host, *others):
    results = {other: SimpleNamespace(error_ops=1) for other in others}
    host.state = SimpleNamespace(inventory=list(others), results=results)
    return host


def rollback_host(**result):
    return FakeHost(RollbackPreview=RollbackPreview().process([json.dumps(result)]))


def roll_back(host, executing=True):
    return run_operation(host, releases.roll_back, "main", None, 60, executing=executing)


def test_rollback_is_one_command_and_names_both_releases():
    for executing in (True, False):
        host = rollback_host(**{"from": CURRENT, "to": FORMER})
        [command] = roll_back(host, executing)
        assert command == f"_begin_and_watch({HOST_TOOL} rollback main --to {OLD}, 60)"
        assert host.logs == [f"rolling back from {NEW} (m with v2-tq) to {OLD} (m with v2)"]


def test_finished_rollback_runs_no_command():
    host = rollback_host(**{"from": FORMER, "to": FORMER, "done": "it has replaced B"})
    assert roll_back(host) == []
    assert host.noops == ["it has replaced B"]


def test_impossible_rollback_is_rejected_and_predicts_no_changes():
    problem = {"where": "main", "what": "was stopped on purpose", "fix": "start it first"}
    result = {"from": FORMER, "to": None, "problem": problem}
    [command] = roll_back(rollback_host(**result))
    assert command.startswith("_report_failure(main: was stopped on purpose")
    host = rollback_host(**result)
    assert roll_back(host, executing=False) == []
    assert host.logs == ["main: was stopped on purpose", "  fix: start it first"]
    assert host.noops == ["cannot be rolled back"]


MALFORMED = (
    "error: /etc/spark/releases/main-aaaaaaaaaaaa/release.json: malformed: KeyError: 'image'; "
    "fix: run the deploy for this host again"
)


@pytest.mark.parametrize(
    ("fact", "operation", "arguments"),
    [
        (RollbackPreview, releases.roll_back, ("main", None, 60)),
        (PrunePreview, prune_host, (KEEP,)),
    ],
)
def test_operation_fails_with_the_problem_reported_by_the_host_tools(fact, operation, arguments):
    host = FakeHost(**{fact.__name__: fact().process(["phase=x", MALFORMED])})
    [command] = run_operation(host, operation, *arguments)
    assert command.startswith(
        "_report_failure(/etc/spark/releases/main-aaaaaaaaaaaa/release.json: malf"
    )
    assert "fix: run the deploy for this host again" in command
    usage = ["spark-host status [--live]: everything", "spark-host check [RELEASE]: prove"]
    assert fact().process(usage) == fact().process([]) == fact.default()
    [command] = run_operation(FakeHost(**{fact.__name__: fact.default()}), operation, *arguments)
    assert "run deploy.py for this host first" in command


def test_rollback_and_prune_previews_change_nothing_on_the_host():
    assert "--dry" in RollbackPreview().command("main", None)
    assert f"--to {OLD} --dry" in RollbackPreview().command("main", OLD)
    assert "prune --dry" in PrunePreview().command("{}")


def require_no_failure(host):
    with on(host):
        try:
            releases.require_no_failure("not changed")
        except HostError as refused:
            return str(refused)
    return ""


def test_failure_of_another_host_prevents_changes():
    failed, second = FakeHost(name="first"), FakeHost(name="second")
    assert "because first failed first" in require_no_failure(after_failure(second, failed))
    third = after_failure(FakeHost(), failed, second)
    assert "because first failed first" in require_no_failure(third)
    lost_before = FakeHost(connected=False)
    assert require_no_failure(after_failure(FakeHost(), lost_before)) == ""
    host = after_failure(rollback_host(**{"from": CURRENT, "to": FORMER}), FakeHost(name="spark-0"))
    [command] = roll_back(host)
    assert command.startswith("_report_failure(")
    assert "because spark-0 failed first" in command


def test_host_lost_during_a_change_prevents_changes_on_other_hosts(monkeypatch):
    monkeypatch.setattr(commands, "RECONNECT_TIMEOUT_S", 0)
    monkeypatch.setattr(commands.gevent, "sleep", lambda _: None)
    lost = FakeHost(shell=lambda script: OSError("no route"))
    assert not releases.run_rollout(None, lost, OLD, 60)
    assert "rolls back the rollout by itself" in lost.logs[-1]
    assert "because spark-1 failed first" in require_no_failure(after_failure(FakeHost(), lost))


PRUNABLE = {
    "items": [
        {"kind": "release", "name": "main-cccccccccccc", "bytes": 0},
        {"kind": "tree", "name": "/srv/spark/models/x", "bytes": 7_250_000_000},
        {"kind": "job", "name": "0" * 12, "bytes": 0},
    ],
    "bytes": 7_250_000_000,
    "kept": {OLD: "serving"},
    "unmanaged": ["/srv/spark/models/mine"],
    "problems": [],
}


@pytest.mark.parametrize("executing", [False, True])
def test_prune_lists_each_item_once_with_its_size(executing):
    host = FakeHost(PrunePreview=read(Pruning, PRUNABLE))
    assert len(run_operation(host, prune_host, KEEP, executing=executing)) == 1
    text = host.log_text
    run_operation(host, prune_host, KEEP)
    assert host.log_text == text
    assert "7.25 GB  tree /srv/spark/models/x" in text
    assert f"release {OLD}: serving" in text
    assert "/srv/spark/models/mine: unmanaged" in text
    assert "state files of 1 finished jobs" in text


def test_prune_without_items_runs_no_command():
    host = FakeHost(PrunePreview=read(Pruning, {**PRUNABLE, "items": [], "bytes": 0}))
    assert run_operation(host, prune_host, KEEP) == []
    assert host.noops == ["nothing to remove"]


PLAN: Any = SimpleNamespace(service="main", name=RELEASE, cluster=None)
[PROVEN_RELEASE] = PROVEN["releases"]


def serving(release=None, **service):
    main = {**PROVEN["services"]["main"], **service}
    changes = {"services": {"main": main}, "releases": [{**PROVEN_RELEASE, **(release or {})}]}
    return FakeHost(Status=host_status({**PROVEN, **changes}))


def roll_out(host, plan=PLAN, *scheduled):
    return run_operation(host, serve.roll_out, plan, 60, scheduled)


def verify_rollback(host, chosen="m/v2-tq"):
    return run_operation(host, releases.verify_rollback, "main", chosen)


def test_rollback_fails_unless_the_serving_release_is_proven():
    assert verify_rollback(serving()) == []
    [command] = verify_rollback(serving(traffic_open=False))
    assert "gateway is closed" in command


@pytest.mark.parametrize(
    ("chosen", "then"),
    [
        ("m/v2-tq", "applies m/v2-tq again; to keep this release, run `spark-deploy use m/v2`"),
        ("m/v2", "applies the current settings"),
    ],
)
def test_rollback_reports_what_the_next_up_command_will_do(chosen, then):
    host = serving({"model": "m", "profile": "v2"})
    assert verify_rollback(host, chosen) == []
    assert host.logs == [f"serves m/v2 ({RELEASE}), proven; the next `spark-deploy up` {then}"]


def test_deploy_does_not_start_a_service_stopped_on_purpose():
    at, by = "2026-11-21T10:00:00Z", "ann@desk"
    stopped = {"schema_version": 1, "at": at, "by": by, "release": RELEASE}
    host = serving(stopped_by_hand=stopped, active=None)
    assert roll_out(host) == []
    assert f"stopped on purpose by ann@desk at {at}" in host.logs[0]
    assert "`spark-deploy start` starts it" in host.logs[0]
    assert run_operation(host, serve.verify_service, PLAN, SimpleNamespace()) == []


def test_deploy_starts_an_on_request_service_only_to_check_it():
    stopped = {"schema_version": 1, "at": "then", "release": RELEASE, "on_request": True}
    state: dict[str, Any] = {"stopped_by_hand": stopped, "active": None, "traffic_open": False}
    host = serving({"unproven": "not running"}, **state)
    assert roll_out(host) == []
    assert run_operation(host, serve.verify_service, PLAN, SimpleNamespace()) == []
    assert [noop for noop in host.noops if "stopped (on request)" in noop] == host.noops
    assert roll_out(serving(**state), DAY) == [f"run_rollout({DAY.name}, 60)"]
    [command] = run_operation(serving(**state), serve.verify_service, DAY, SimpleNamespace())
    assert "not proven" in command
    outdated = {**PROVEN["services"]["main"]["gateway"], "difference": "the key changed"}
    assert len(roll_out(serving(gateway=outdated, **state))) == 1


def test_deploy_after_a_rollback_reports_that_it_applies_the_settings_again():
    back = {"schema_version": 1, "state": "done", "from": RELEASE, "to": OLD, "at": "then"}
    host = serving(active=OLD, known_good=OLD, rolled_back=back)
    assert len(roll_out(host)) == 1
    assert f"was rolled back from {RELEASE}" in host.logs[0]
    assert f"but the settings select {RELEASE}" in host.logs[0]


def test_deploy_resets_the_failed_unit_of_a_killed_rollout():
    reset = f"systemctl reset-failed spark-switch@{RELEASE}.service"
    assert roll_out(serving({"change_failed": True})) == [reset]
    down = serving({"change_failed": True}, active=None)
    assert roll_out(down) == [f"run_rollout({RELEASE}, 60)"]


NIGHT: Any = SimpleNamespace(name=RELEASE, service="main")
DAY: Any = SimpleNamespace(name="main-cccccccccccc", service="main", cluster=None)


def test_deploy_keeps_the_scheduled_release_if_it_is_proven():
    host = serving()
    assert host.facts["Status"].expected_release(DAY, [NIGHT]) is NIGHT
    assert roll_out(host, DAY, NIGHT) == []
    assert host.noops == [f"keeping {RELEASE}, which is scheduled now"]
    assert roll_out(serving(), DAY) == [f"run_rollout({DAY.name}, 60)"]
    broken = {"ok": False, "release": RELEASE, "detail": "timed out"}
    assert host_status({**PROVEN, "live": broken}).expected_release(DAY, [NIGHT]) is DAY


@pytest.mark.parametrize(
    ("active", "known_good", "starts"),
    [
        (None, None, True),
        (None, RELEASE, True),
        (None, OLD, False),
        (OLD, OLD, False),
        (OLD, None, False),
        (RELEASE, None, False),
    ],
)
def test_servers_start_in_parallel_only_where_no_service_can_be_interrupted(
    active, known_good, starts
):
    host = serving(active=active, known_good=known_good)
    assert len(run_operation(host, serve.start_service, PLAN, 60)) == starts


@pytest.mark.parametrize(
    ("active", "operation", "refused"),
    [(None, serve.start_service, False), (OLD, serve.roll_out, True)],
)
def test_failed_host_blocks_rollouts_but_not_initial_deploys(active, operation, refused):
    host = after_failure(serving(active=active, known_good=active), FakeHost(name="first"))
    [command] = run_operation(host, operation, PLAN, 60)
    assert ("because first failed first" in command) == refused


def test_dry_run_predicts_the_first_start_only_once():
    host = serving(active=None, known_good=None)
    with on(host, executing=False):
        first = list(serve.start_service._inner(PLAN, 60))
        second = list(serve.roll_out._inner(PLAN, 60))
    assert (len(first), second, host.noops) == (1, [], ["an earlier operation starts this release"])


BEGUN = '{"release": "r", "request": "id1", "joined": false}'


def rollout(**fields):
    return to_json(Rollout("r", **fields))


SWITCHED = rollout(state="switched", phase="done", times_s={"start": 1.0})


def watch(monkeypatch, *answers, state=None):
    monkeypatch.setattr(releases, "POLL_EVERY_S", 0)
    queue = [BEGUN, *answers]
    host = FakeHost(shell=lambda script: queue.pop(0))
    return releases._begin_and_watch(state, host, "switch-begin r", 60), host


def test_progress_of_a_rollout_is_read_by_its_id(monkeypatch):
    running = rollout(state="running", phase="check")
    done, host = watch(monkeypatch, rollout(), running, SWITCHED)
    assert done
    assert all("switch-poll r id1" in script for script, _ in host.commands[1:])


@pytest.mark.parametrize(("follows", "lines"), [(True, 4), (False, 2)])
def test_plain_pyinfra_logs_each_rollout_step_once(monkeypatch, follows, lines):
    steps = [f"waited_s={5 * n} loading weights, {n}.0 of 9.0 GB" for n in (1, 2, 3)]
    steps += ["waited_s=20 compiling, 1 s"]
    running = [rollout(state="running", phase="start", progress=step) for step in steps]
    state = SimpleNamespace(callback_handlers=[SimpleNamespace(follows_progress=follows)])
    _, host = watch(monkeypatch, *running, SWITCHED, state=state)
    assert host.log_text.count("rollout of r: start: waited_s=") == lines


def test_deploy_keeps_waiting_for_a_rollout_if_its_progress_is_unreadable(monkeypatch):
    failed = Failed("error: systemctl show: no answer within 60 s; fix: run again")
    done, host = watch(monkeypatch, failed, SWITCHED)
    assert done
    assert "systemctl show: no answer within 60 s" in host.log_text


REASON = "check answers: wrong answer to 'capital of France': 'Rome' does not match 'Paris'"
ENDED = {"ended_at": "2026-01-01T00:00Z", "failed_phase": "check"}


def report(active=OLD, is_open=True, **result):
    release = {"name": OLD, "model": "large", "profile": "agent"}
    service = {"active": active, "traffic_open": is_open}
    status = host_status({"releases": [release], "services": {"main": service}}).report
    host = FakeHost(shell=lambda _: Failed("busy") if active == "" else to_json(status))
    good = releases.report_rollout(host, NEW, Rollout(NEW, **result))
    return good, host.log_text.splitlines()


SERVES, NOTHING = "spark-1 still serves large with agent; ", "spark-1 serves nothing; "
UNKNOWN = "spark-1 does not report which release it serves; "
CUT_OFF = {"ended_at": None, "failed_phase": None, "phase": "start", "reason": None}
MEMORY = "memory: 70.0 GiB is needed, but the host has only 64.0 GiB; fix: choose a smaller model"
QUOTING = "check first answer: wrong answer to 'Who?': 'a; b; c' does not match 'd'"
NEVER_READY = "check ready: not ready after 2400 s: no answer; ValueError: Free memory on device"


@pytest.mark.parametrize(
    ("active", "state", "result", "headline", "more"),
    [
        (OLD, "rolled-back", {},
         f"{SERVES}the new release was rejected: wrong answer to 'capital of France'\n", "fix: "),
        (OLD, "refused", {"reason": MEMORY, "failed_phase": "prove"},
         f"{SERVES}the new release was rejected: memory: 70.0 GiB", "fix: choose a smaller model"),
        (OLD, "rolled-back", {"reason": NEVER_READY, "failed_phase": "start"},
         f"{SERVES}the new release was rejected: not ready after", "ValueError: Free memory on"),
        (None, "failed-no-previous", {}, f"{NOTHING}the new release was rejected: wrong answer",
         "there is no earlier release to restore"),
        (OLD, "rolled-back", {"reason": f"{QUOTING}; fix: x"}, f"{SERVES}the new", "fix: x"),
        (None, "rollback-failed", {"reason": f"{REASON}; the old release was not restored: died"},
         f"{NOTHING}the new release was rejected: wrong", "the old release was not restored: died"),
        (OLD, "refused", {"serving": NEW}, f"{SERVES}the check of this release failed: ", "fix: "),
        (OLD, "interrupted", CUT_OFF, f"{SERVES}the rollout of the new release was inter", ""),
        (None, "not-started", {**CUT_OFF, "reason": "error"}, f"{NOTHING}the rollout of", ""),
        ("", "interrupted", CUT_OFF, f"{UNKNOWN}the rollout of the new release was", ""),
    ],
)  # fmt: skip
def test_failed_rollout_reports_serving_release_and_reasons(active, state, result, headline, more):
    good, lines = report(active, state=state, **{**ENDED, "reason": REASON, **result})
    assert not good
    assert f"{lines[0]}\n".startswith(headline)
    assert len(lines[0]) < 220
    phase = {**ENDED, **result}["failed_phase"] or result["phase"]
    assert lines[1].startswith(f"  {NEW}: {state} in phase {phase}: ")
    assert ("'a; b; c'" in lines[1]) == ("'a; b; c'" in (result.get("reason") or ""))
    assert [line for line in lines[2:] if line.startswith(f"  {more}")]


def test_host_with_closed_gateway_is_reported_as_serving_nothing():
    _, [headline, *_] = report(OLD, False, state="rollback-failed", reason=REASON, **ENDED)
    assert headline.startswith(NOTHING)


def test_engine_log_is_written_only_to_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tail = ("loading \x1b[31m", "ERROR CANARY")
    _, lines = report(state="rolled-back", reason=REASON, log_tail=tail, **ENDED)
    path = lines[-1].removeprefix("  engine log: ")
    assert "CANARY" not in "".join(lines)
    assert path.startswith(str(tmp_path))
    assert Path(path).read_text().splitlines() == ["loading \ufffd[31m", "ERROR CANARY"]


def test_successful_rollout_reports_times_warnings_and_speed():
    times, bench = {"start": 61.25, "check": 3.0}, ["speed: 30.1 tokens/s", "slower than before"]
    warnings = ("repeat: two texts",)
    assert report(state="switched", times_s=times, bench=bench, warnings=warnings) == (
        True,
        [f"serves {NEW} (start 61.2 s, check 3.0 s)", f"check warning: {warnings[0]}", *bench],
    )


DROP_IN = "/etc/systemd/system/spark-serve@.service.d/override.conf"


@pytest.mark.parametrize(("accepted", "is_refused"), [((), True), ((DROP_IN,), False)])
def test_unmanaged_systemd_drop_ins_are_rejected_unless_allowed(accepted, is_refused):
    host = FakeHost(Status=host_status({**PROVEN, "unit_overrides": [DROP_IN]}))
    commands = run_operation(host, serve.check_unit_files, accepted, executing=True)
    assert [command.startswith("_report_failure(") for command in commands] == [True] * is_refused
