"""A candidate whose last steps fail is taken back, and nothing names it good afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from spark_contract import files
from spark_contract.errors import HostToolError
from spark_host.engine.client import Engine, Metrics, SilentError
from spark_host.gateway import gateway, traffic
from spark_host.records import boot
from spark_host.rollout import change, rollout
from spark_host.rollout.record import Record, boot_id
from spark_host.system import systemd
from stub_host import Host
from stub_systemd import A, B, Systemd, changed_to


def refuse(why: str, *, times: int) -> Callable[..., None]:
    """Return a step that fails that many times, then never again."""
    left = iter([why] * times)

    def step(*_: object) -> None:
        said = next(left, None)
        if said is not None:
            raise HostToolError("spark-gateway@main.service", said, "journalctl")

    return step


def test_a_first_release_that_cannot_be_enabled_is_not_what_a_start_would_take(
    host: Host, units: Systemd
) -> None:
    host.release(B)
    units.failing = ("enable", f"spark-serve@{B}.service")

    result = changed_to(host, B)

    assert (result["state"], result["failed_phase"]) == ("failed-no-previous", "enable")
    assert "Read-only file system" in result["reason"]
    assert (units.active, boot.enabled("main", host.paths)) == (set(), [])
    assert boot.good("main", host.paths)["release"] is None
    with pytest.raises(HostToolError, match="no proven release to start"):
        boot.start_service("main", host.paths)


def test_a_release_that_cannot_be_enabled_leaves_the_old_one_good_and_no_way_back_to_itself(
    host: Host, units: Systemd
) -> None:
    host.release(A)
    host.release(B)
    assert changed_to(host, A)["state"] == "switched"
    units.failing = ("enable", f"spark-serve@{B}.service")

    result = changed_to(host, B)

    assert (result["state"], result["failed_phase"]) == ("rolled-back", "enable")
    assert units.active == {f"spark-serve@{A}.service"}
    assert boot.enabled("main", host.paths) == [A]
    good = boot.good("main", host.paths)
    assert (good["release"], good["previous"]) == (A, [])
    assert "nothing to go back to" in change.way_back("main", None, host.paths)["problem"]["what"]


def test_an_old_engine_that_cannot_be_stopped_serves_on_and_nothing_is_started_beside_it(
    host: Host, units: Systemd
) -> None:
    host.release(A)
    host.release(B)
    assert changed_to(host, A)["state"] == "switched"
    units.failing = ("stop", f"spark-serve@{A}.service")

    result = changed_to(host, B)

    assert (result["state"], result["failed_phase"]) == ("rolled-back", "stop")
    assert result["reason"] == f"systemctl stop spark-serve@{A}.service: Read-only file system"
    assert "start" not in result["times_s"]
    assert (result["serving"], units.active) == (A, {f"spark-serve@{A}.service"})
    assert boot.enabled("main", host.paths) == [A]
    assert boot.good("main", host.paths)["release"] == A


@pytest.mark.parametrize("phase", ["stop", "start"])
def test_the_log_of_a_candidates_earlier_run_is_not_told_as_that_of_this_change(
    host: Host, units: Systemd, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    host.release(A)
    host.release(B)
    assert changed_to(host, A)["state"] == "switched"
    monkeypatch.setattr(systemd, "journal", lambda *words, **more: ["what its last run said"])
    if phase == "stop":
        units.failing = ("stop", f"spark-serve@{A}.service")
    else:
        monkeypatch.setattr(rollout, "_start", refuse("it ended", times=1))

    result = changed_to(host, B)

    assert result["failed_phase"] == phase
    assert result["log_tail"] == ([] if phase == "stop" else ["what its last run said"])


def test_a_unit_that_is_gone_by_the_time_it_is_stopped_stops_no_change(
    host: Host, units: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.release(B)
    monkeypatch.setattr(systemd, "listed", lambda pattern: [f"spark-serve@{A}.service"])
    units.failing = ("stop", f"spark-serve@{A}.service")
    assert changed_to(host, B)["state"] == "switched"


@pytest.mark.parametrize("fails", [True, False])
def test_a_change_killed_while_it_enables_goes_back_when_that_fails_again(
    host: Host, units: Systemd, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    host.release(A)
    release = host.release(B)
    assert changed_to(host, A)["state"] == "switched"
    left = Record(release, host.paths)
    left.set(phase="enable", previous=A, invocation_id="switch", boot_id=boot_id())
    monkeypatch.setenv("INVOCATION_ID", "switch")
    monkeypatch.setattr(systemd, "is_stopping", lambda: False)
    monkeypatch.setattr(rollout, "_covered", lambda release, paths: True)
    units.active = {f"spark-serve@{B}.service"}
    if fails:
        units.failing = ("enable", f"spark-serve@{B}.service")

    assert rollout.recover(B, host.paths) == 0

    result = files.read_json(host.paths.switch(B)) or {}
    serves = A if fails else B
    assert (result["state"], result["serving"]) == ("rolled-back" if fails else "switched", serves)
    assert result["failed_phase"] == ("enable" if fails else None)
    if fails:
        assert "was killed in phase enable; and then: " in result["reason"]
        assert "Read-only file system" in result["reason"]
    assert units.active == {f"spark-serve@{serves}.service"}
    assert boot.enabled("main", host.paths) == [serves]
    assert boot.good("main", host.paths)["release"] == serves


def test_a_good_record_from_before_the_trial_stays(host: Host, units: Systemd) -> None:
    release = host.release(A)
    assert changed_to(host, A)["state"] == "switched"
    boot.withdraw_good(release, "9999-01-01T00:00:00Z", host.paths)
    assert boot.good("main", host.paths)["release"] == A


TAKEN = "bind() to 127.0.0.1:8000 failed (98: Address already in use)"


def test_a_gateway_that_cannot_have_its_port_fails_a_first_change_in_phase_open(
    host: Host, units: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.release(B)
    monkeypatch.setattr(gateway, "bring_up", refuse(TAKEN, times=1))

    result = changed_to(host, B)

    assert (result["state"], result["failed_phase"]) == ("failed-no-previous", "open")
    assert TAKEN in result["reason"]
    assert (units.active, boot.enabled("main", host.paths)) == (set(), [])
    assert boot.good("main", host.paths)["release"] is None


@pytest.mark.parametrize(("times", "state"), [(1, "rolled-back"), (2, "rollback-failed")])
def test_a_gateway_that_cannot_have_its_port_leaves_the_old_release_running_and_good(
    host: Host, units: Systemd, monkeypatch: pytest.MonkeyPatch, times: int, state: str
) -> None:
    host.release(A)
    host.release(B)
    assert changed_to(host, A)["state"] == "switched"
    monkeypatch.setattr(gateway, "bring_up", refuse(TAKEN, times=times))

    result = changed_to(host, B)

    assert (result["state"], result["failed_phase"]) == (state, "open")
    assert result["reason"].count(TAKEN) == times
    assert (result["serving"], units.active) == (A, {f"spark-serve@{A}.service"})
    assert boot.enabled("main", host.paths) == [A]
    assert boot.good("main", host.paths)["release"] == A


def test_a_step_that_the_system_refuses_is_the_reason_of_the_way_back(
    host: Host, units: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.release(A)
    host.release(B)
    assert changed_to(host, A)["state"] == "switched"
    gone = iter([FileNotFoundError(2, "No such file or directory", "engine.sock")])

    def open_for(*_: object) -> None:
        for error in gone:
            raise error

    monkeypatch.setattr(traffic, "open_for", open_for)
    result = changed_to(host, B)

    assert (result["state"], result["failed_phase"]) == ("rolled-back", "open")
    assert "engine.sock" in result["reason"]
    assert units.active == {f"spark-serve@{A}.service"}


def test_a_server_that_runs_and_is_proven_is_not_stopped_for_its_gateway(
    host: Host, units: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.release(A)
    host.release(B)
    assert changed_to(host, B)["state"] == "switched"
    assert changed_to(host, A)["state"] == "switched"
    monkeypatch.setattr(gateway, "bring_up", refuse(TAKEN, times=9))

    result = changed_to(host, A)

    assert (result["state"], result["failed_phase"]) == ("refused", "open")
    assert TAKEN in result["reason"]
    assert (result["serving"], units.active) == (A, {f"spark-serve@{A}.service"})


def test_a_server_proven_anew_is_not_stopped_when_that_was_killed_and_its_gateway_fails(
    host: Host, units: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.release(A)
    release = host.release(B)
    assert changed_to(host, A)["state"] == "switched"
    assert changed_to(host, B)["state"] == "switched"
    monkeypatch.setenv("INVOCATION_ID", "one")
    Record(release, host.paths).set(phase="open", previous=A, serving=B)
    monkeypatch.setattr(systemd, "is_stopping", lambda: False)
    monkeypatch.setattr(rollout, "_covered", lambda release, paths: True)
    monkeypatch.setattr(gateway, "bring_up", refuse(TAKEN, times=9))

    assert rollout.recover(B, host.paths) == 0

    result = files.read_json(host.paths.switch(B)) or {}
    assert (result["state"], result["serving"]) == ("refused", B)
    assert "was killed in phase open; and then: " in result["reason"]
    assert units.active == {f"spark-serve@{B}.service"}


@pytest.mark.parametrize("times", [0, 1])
def test_a_change_killed_after_its_proof_is_finished_or_else_undone(
    host: Host, units: Systemd, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    host.release(A)
    killed = host.release(B)
    assert changed_to(host, A)["state"] == "switched"
    units.active = {killed.serve_unit}
    monkeypatch.setenv("INVOCATION_ID", "one")
    Record(killed, host.paths).set(phase="open", previous=A)
    monkeypatch.setattr(systemd, "is_stopping", lambda: False)
    monkeypatch.setattr(rollout, "_covered", lambda release, paths: release == killed)
    monkeypatch.setattr(gateway, "bring_up", refuse(TAKEN, times=times))

    assert rollout.recover(B, host.paths) == 0

    result = files.read_json(host.paths.switch(B)) or {}
    serves = [B, A][times]
    assert (result["state"], result["serving"]) == (["switched", "rolled-back"][times], serves)
    assert units.active == {f"spark-serve@{serves}.service"}
    assert (TAKEN in str(result["reason"])) == bool(times)


def test_an_engine_too_busy_for_its_metrics_is_waited_for_as_long_as_a_drain_may_take(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = host.release(timeouts={"start_s": 3, "stop_s": 2, "drain_s": 30})
    answers = iter([SilentError("late"), 3.0, SilentError("late"), 0.0])

    def metrics(self: Engine, timeout_s: float = 10) -> Metrics:
        answer = next(answers)
        if isinstance(answer, SilentError):
            raise answer
        return Metrics.parse(f"vllm:num_requests_running {answer}")

    monkeypatch.setattr(Engine, "metrics", metrics)
    rollout._drain(release, host.paths, Record(release, host.paths))
    assert list(answers) == []
