"""A change is followed under its own id, and a way back leads where it says."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from spark_contract import files
from spark_contract.errors import HostToolError
from spark_host.records import boot
from spark_host.rollout import change, rollout
from spark_host.rollout.record import Record, boot_id
from spark_host.system import docker, systemd
from stub_host import Host

from tests.receipts import source_receipt

A, B, C = (f"main-{digit * 12}" for digit in "abc")


@pytest.fixture
def systemctl(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What systemd says of the unit that changes over, and the words it was given."""
    told: dict[str, Any] = {"unit": {"ActiveState": "inactive"}, "words": []}

    def run(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        told["words"].append(words)
        return subprocess.CompletedProcess(words, told.get("code", 0), "", told.get("said", ""))

    monkeypatch.setattr(systemd, "systemctl", run)
    monkeypatch.setattr(systemd, "state", lambda unit, *fields: told["unit"])
    monkeypatch.setattr(systemd, "show", lambda units, fields: {})
    return told


@pytest.fixture(autouse=True)
def whole_images(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Images docker has; a test takes one away."""
    there = {"spark-vllm:stub"}
    monkeypatch.setattr(docker, "image", lambda tag: {"Id": tag} if tag in there else None)
    return there


def good(host: Host, *names: str) -> None:
    """Have releases on the host, made good in this order, each with its tree."""
    for name in names:
        tree = host.paths.root / f"tree-{name}"
        tree.mkdir(exist_ok=True)
        (tree / "receipt.json").write_text(source_receipt("d" * 64))
        release = host.release(name, tree={"path": str(tree), "digest": "d" * 64})
        boot.record_good(release, host.paths)


def record(host: Host, name: str = A, **values: Any) -> None:
    files.write_json(host.paths.switch(name), {"release": name, "state": "switched", **values})


def test_what_an_earlier_change_left_is_gone_before_the_next_begins(
    host: Host, systemctl: dict[str, Any]
) -> None:
    host.release(A)
    record(host)

    begun = change.begin(A, host.paths)

    assert not host.paths.switch(A).exists()
    assert ("start", "--no-block", f"spark-switch@{A}.service") in systemctl["words"]
    systemctl["unit"] = {"ActiveState": "activating"}
    assert change.poll(A, host.paths, begun["request"])["state"] == "none"


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
def test_a_stale_record_is_never_taken_for_the_outcome_of_this_change(
    host: Host, systemctl: dict[str, Any], stale: dict[str, Any]
) -> None:
    host.release(A)
    begun = change.begin(A, host.paths)
    systemctl["unit"] = {"ActiveState": "activating", "InvocationID": "this-run"}
    record(host, **{"request": begun["request"], "invocation_id": "this-run"})
    assert change.poll(A, host.paths, begun["request"])["state"] == "switched"

    found = {"release": A, "state": "switched", "request": begun["request"], **stale}
    files.write_json(host.paths.switch(A), found)

    assert change.poll(A, host.paths, begun["request"])["state"] == "none"


def test_a_change_whose_unit_never_ran_is_said_to_have_failed(
    host: Host, systemctl: dict[str, Any]
) -> None:
    host.release(A)
    begun = change.begin(A, host.paths)
    record(host, request="of-yesterday")
    systemctl["unit"] = {"ActiveState": "failed", "Result": "exit-code"}

    found = change.poll(A, host.paths, begun["request"])

    assert found["state"] == "not-started"
    assert "did not run (exit-code)" in found["reason"]


def test_a_change_that_ended_before_its_record_is_told_in_its_last_words(
    host: Host, systemctl: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.release(A)
    begun = change.begin(A, host.paths)
    systemctl["unit"] = {"ActiveState": "failed", "Result": "exit-code", "InvocationID": "run"}
    said = {
        ("run", f"spark-switch@{A}.service"): [
            "error: switch of main: another change is under way; fix: wait for it",
            "phase=none",
        ]
    }
    monkeypatch.setattr(systemd, "journal", lambda run, unit, lines: said[run, unit])

    found = change.poll(A, host.paths, begun["request"])

    assert found["state"] == "not-started"
    assert found["reason"] == "switch of main: another change is under way; fix: wait for it"


def test_a_change_that_waits_its_turn_has_not_failed(host: Host, systemctl: dict[str, Any]) -> None:
    host.release(A)
    begun = change.begin(A, host.paths)
    systemctl["unit"] = {"ActiveState": "inactive", "Job": "17"}
    assert change.poll(A, host.paths, begun["request"])["state"] == "none"


def test_a_change_under_way_is_joined_under_its_own_id(
    host: Host, systemctl: dict[str, Any]
) -> None:
    host.release(A)
    first = change.begin(A, host.paths)
    systemctl["unit"] = {"ActiveState": "activating", "InvocationID": "x"}
    record(host, state="running", request=first["request"], invocation_id="x")
    systemctl["words"].clear()

    second = change.begin(A, host.paths)

    assert (second["joined"], second["request"]) == (True, first["request"])
    assert systemctl["words"] == []
    assert change.poll(A, host.paths, second["request"])["state"] == "running"


def test_the_record_of_a_switch_says_whose_outcome_it_is(
    host: Host, systemctl: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = host.release(A)
    begun = change.begin(A, host.paths)
    monkeypatch.setenv("INVOCATION_ID", "this-run")
    written = Record(release, host.paths).data
    assert (written["request"], written["invocation_id"]) == (begun["request"], "this-run")


def test_a_killed_switch_is_only_finished_by_its_own_run(
    host: Host, systemctl: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.release(A)
    left = {"state": "running", "phase": "start", "boot_id": boot_id(), "previous": None}
    record(host, **left, invocation_id="an-earlier-run")
    monkeypatch.setenv("INVOCATION_ID", "this-run")

    assert rollout.recover(A, host.paths) == 0

    assert files.read_json(host.paths.switch(A))["state"] == "running"
    assert systemctl["words"] == []


def test_a_unit_that_systemd_refuses_is_an_error_with_its_words(
    host: Host, systemctl: dict[str, Any]
) -> None:
    host.release(A)
    systemctl.update(code=1, said="Unit is masked.")
    with pytest.raises(HostToolError, match="Unit is masked"):
        change.begin(A, host.paths)


def test_the_way_back_is_the_release_before(host: Host) -> None:
    good(host, A, B)
    way = change.way_back("main", None, host.paths)
    assert (way["from"]["name"], way["to"]["name"]) == (B, A)
    assert way["to"]["profile"] == "v2"
    assert "problem" not in way


def test_a_named_release_is_gone_to(host: Host) -> None:
    good(host, A, B, C)
    assert change.way_back("main", A, host.paths)["to"]["name"] == A


def problem(host: Host, wanted: str | None = None) -> str:
    found = change.way_back("main", wanted, host.paths)["problem"]
    return f"{found['where']}: {found['what']}; {found['fix']}"


def test_with_nothing_before_the_way_back_says_so(host: Host) -> None:
    good(host, A)
    assert "nothing to go back to" in problem(host)


def test_a_release_that_is_not_there_is_refused_with_those_that_are(host: Host) -> None:
    good(host, A, B)
    said = problem(host, C)
    there = f"{A} = lab-stub with v2; {B} = lab-stub with v2"
    assert f"{C}: is not a release on this host (there: {there})" in said


def test_a_way_back_whose_tree_is_gone_names_one_that_is_whole(host: Host) -> None:
    good(host, A, B, C)
    (host.paths.root / f"tree-{B}" / "receipt.json").unlink()
    said = problem(host)
    assert f"{B}: tree" in said
    assert "is gone" in said
    assert f"name one that is whole ({A} = lab-stub with v2)" in said
    assert "model: lab-stub and profile: v2" in said


def test_a_way_back_whose_image_is_gone_says_how_to_get_it(
    host: Host, whole_images: set[str]
) -> None:
    good(host, A, B)
    whole_images.clear()
    said = problem(host)
    assert "image spark-vllm:stub" in said
    assert "run deploy.py" in said


def test_a_service_that_was_stopped_is_not_rolled_back(host: Host) -> None:
    good(host, A, B)
    files.write_json(host.paths.stopped("main"), {"release": B, "at": "now"})
    assert "stopped on purpose" in problem(host)


def test_a_second_rollback_does_not_return_to_what_was_left(host: Host) -> None:
    good(host, A, B)
    boot.note_rollback("main", A, host.paths)
    good(host, A)

    way = change.way_back("main", None, host.paths)

    assert f"{A} serves in place of {B}" in way["done"]
    assert boot.rolled_back("main", host.paths)["from"] == B
    # By name every release can be reached.
    assert change.way_back("main", B, host.paths)["to"]["name"] == B


def test_a_rollback_that_failed_is_none(host: Host) -> None:
    good(host, A, B)
    boot.note_rollback("main", A, host.paths)
    good(host, B)  # the old one came back
    assert boot.rolled_back("main", host.paths) is None
    assert change.way_back("main", None, host.paths)["to"]["name"] == A


def test_the_next_change_ends_a_rollback(host: Host) -> None:
    good(host, A, B)
    boot.note_rollback("main", A, host.paths)
    good(host, A, C)
    assert boot.rolled_back("main", host.paths) is None
    assert change.way_back("main", None, host.paths)["to"]["name"] == A


def test_a_dry_rollback_asks_for_nothing(
    host: Host, systemctl: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    good(host, A, B)
    assert change.rollback(["main", "--dry"], host.paths) == 0
    assert json.loads(capsys.readouterr().out)["to"]["name"] == A
    assert systemctl["words"] == []
    assert not host.paths.rollback("main").exists()

    assert change.rollback(["main"], host.paths) == 0
    assert ("start", "--no-block", f"spark-switch@{A}.service") in systemctl["words"]


def test_a_stop_keeps_who_and_when_over_a_second_stop(
    host: Host, systemctl: dict[str, Any]
) -> None:
    good(host, A)
    boot.stop_service("main", "ann@desk", host.paths)
    first = files.read_json(host.paths.stopped("main"))
    boot.stop_service("main", "ben@laptop", host.paths)
    assert files.read_json(host.paths.stopped("main")) == first
    assert (first["by"], first["release"]) == ("ann@desk", A)


@pytest.mark.parametrize(("began", "ok"), [("2026-01-01T00:00:00Z", False), (None, True)])
def test_a_failed_trial_keeps_no_proof_of_its_own_and_leaves_earlier_ones(
    host: Host, systemctl: dict[str, Any], began: str | None, ok: bool
) -> None:
    release = host.release(A)
    proven = {"release": A, "ok": True, "level": "quick", "checked_at": "2026-01-01T00:00:00Z"}
    files.write_json(host.paths.proof(A), proven)
    trial = Record(release, host.paths)
    trial.set(failed_phase="start", reason="it died after its quick check", log_tail=["x"])
    trial.data["started_at"] = began or trial.data["started_at"]

    rollout._back(release, None, host.paths, trial)

    assert files.read_json(host.paths.proof(A)) == {**proven, "ok": ok}
    assert trial.data["state"] == "failed-no-previous"
