"""A change of release ends proven, or the old one serves again: on a guest, with the stub."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from tests.clients import assert_no_long_wait_of_ours, clients, outages_s, own_overhead_s
from tests.faults.bench import HOST, A, B, Bench, C
from tests.faults.plants import PLANTS


def test_a_first_release_is_proven_then_boots(bench: Bench) -> None:
    bench.good(A)
    bench.serves(A)


def test_there_and_back_ends_where_it_began(bench: Bench) -> None:
    bench.good(A)
    bench.release(B, engine__argv=["--kv-cache-dtype", "fp8"])

    assert bench.switch(B)["state"] == "switched"
    bench.serves(B)
    assert 'cache_dtype="fp8"' in bench.run(
        "curl -s --unix-socket /run/spark/engines/main/engine.sock http://x/metrics"
    )

    assert bench.switch(A)["state"] == "switched"
    bench.serves(A)


def test_switching_to_what_already_serves_restarts_nothing(bench: Bench) -> None:
    bench.good(A)
    before = bench.run(f"systemctl show -p InvocationID --value spark-serve@{A}")

    assert bench.switch(A)["state"] == "switched"

    assert bench.run(f"systemctl show -p InvocationID --value spark-serve@{A}") == before


@pytest.mark.parametrize("plant", PLANTS)
def test_a_bad_release_ends_with_the_old_one_proven(bench: Bench, plant: str) -> None:
    changes, phase = PLANTS[plant].release, PLANTS[plant].phase
    if f"spark-serve@{A}.service" not in bench.guest.serving():
        bench.good(A)
    if plant == "memory that others hold":
        changes = {"memory__needed_bytes": bench.total_bytes() - (64 << 20), **changes}
    bench.release(B, **changes)

    result = bench.switch(B)

    assert result["state"] == ("refused" if phase == "prove" else "rolled-back")
    assert (result["failed_phase"], result["serving"]) == (phase, A)
    assert result["reason"]
    bench.serves(A)


def test_a_bad_first_release_leaves_nothing_running_and_nothing_enabled(bench: Bench) -> None:
    bench.wipe()
    bench.release(B, engine__env={"STUB_FAULT": "garbage"})

    result = bench.switch(B)

    assert result["state"] == "failed-no-previous"
    assert "ent fjord" in result["reason"]
    assert (bench.guest.serving(), bench.guest.boots()) == ([], [])
    assert bench.run("docker ps -aq") == ""
    assert bench.run("systemctl is-system-running || true") in ("running", "degraded")


def test_the_log_of_a_failed_start_is_kept_with_the_result(bench: Bench) -> None:
    bench.good(A)
    bench.release(B, engine__env={"STUB_FAULT": "oom-at-start"})
    tail = "\n".join(bench.switch(B)["log_tail"])
    assert "Free memory on device cuda:0 (10.53/121.69 GiB)" in tail


# How a change is held in each phase: a slow engine where there is one, else a systemctl that waits.
HELD = {
    "stop": f"stop spark-serve@{A}",
    "open": "show * spark-gateway@main",
    "enable": f"enable spark-serve@{B}",
}
SLOW = {"STUB_PIECE_S": "0.05"}


def _hold(bench: Bench, phase: str) -> None:
    """Bring up A, begin a change to B, and return when it is in a phase and stays there."""
    bench.good(A, engine__env=SLOW)
    most = bench.total_bytes() - (64 << 20)
    memory = {"memory__needed_bytes": most} if phase == "memory" else {}
    bench.release(B, engine__env={"STUB_LOAD_S": "3", **SLOW}, **memory)
    bench.slow_systemctl(HELD.get(phase))
    if phase == "drain":
        bench.ask_for_long()
    bench.begin(B)
    bench.at_phase(B, phase)


@pytest.mark.parametrize("phase", ["drain", "stop", "memory", "start", "check", "open", "enable"])
def test_a_killed_switch_leaves_a_proven_server(bench: Bench, phase: str) -> None:
    _hold(bench, phase)

    bench.run(f"systemctl kill -s KILL spark-switch@{B}")

    bench.slow_systemctl(None)
    result = bench.ended(B)
    # Past the full check there is nothing left to doubt: the change is finished, not undone.
    finished = phase in ("open", "enable")
    assert result["state"] == ("switched" if finished else "rolled-back")
    bench.serves(B if finished else A)


def test_a_switch_killed_while_it_enables_goes_back_when_that_fails_again(bench: Bench) -> None:
    _hold(bench, "enable")
    bench.failing_systemctl(HELD["enable"], "Read-only file system")

    # The reload has systemd look again: with the lab's first version of control groups it may
    # miss that the last of several killed processes is gone, and wait for it.
    bench.run(f"systemctl kill -s KILL spark-switch@{B}; systemctl daemon-reload")

    try:
        result = bench.ended(B)
    finally:
        bench.slow_systemctl(None)
    assert (result["state"], result["failed_phase"]) == ("rolled-back", "enable")
    assert "was killed in phase enable; and then: " in result["reason"]
    assert "Read-only file system" in result["reason"]
    bench.serves(A)


def test_an_old_release_that_systemd_does_not_stop_serves_on(bench: Bench) -> None:
    bench.good(A)
    bench.release(B)
    before = bench.run(f"systemctl show -p InvocationID --value spark-serve@{A}")
    unstoppable = f"/etc/systemd/system/spark-serve@{A}.service.d/99-bench.conf"
    bench.write(unstoppable, "[Unit]\nRefuseManualStop=yes")
    bench.run("systemctl daemon-reload")
    try:
        result = bench.switch(B)
    finally:
        bench.run(f"rm {unstoppable}; systemctl daemon-reload")

    assert (result["state"], result["failed_phase"]) == ("rolled-back", "stop")
    assert f"systemctl stop spark-serve@{A}.service: Failed to stop" in result["reason"]
    assert bench.run(f"systemctl show -p InvocationID --value spark-serve@{A}") == before
    bench.serves(A)


@pytest.mark.parametrize("phase", ["stop", "start", "check", "enable"])
def test_a_power_cut_during_a_change_boots_the_old_release(bench: Bench, phase: str) -> None:
    _hold(bench, phase)

    bench.power_cut()

    bench.slow_systemctl(None)
    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)
    assert bench.guest.serving() == [f"spark-serve@{A}.service"]
    assert bench.answers()
    assert bench.guest.json(f"{HOST} switch-poll {B}")["state"] == "interrupted"
    assert bench.switch(B)["state"] == "switched"
    bench.serves(B)


def test_a_proven_release_comes_back_after_a_power_cut_by_itself(bench: Bench) -> None:
    bench.good(A)
    bench.power_cut()
    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)
    bench.serves(A)
    told = bench.told(A)
    assert (told["unproven"], told["proof"]["level"]) == (None, "quick")


def test_of_two_enabled_releases_only_the_good_one_boots(bench: Bench) -> None:
    bench.good(A)
    bench.release(B)
    bench.run(f"systemctl enable -q spark-serve@{B}")
    bench.power_cut()
    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)
    assert bench.guest.serving() == [f"spark-serve@{A}.service"]


def test_a_service_stopped_by_hand_stays_down_over_a_reboot(bench: Bench) -> None:
    bench.good(A)
    bench.run(f"{HOST} stop-service main")
    bench.power_cut()
    time.sleep(3)
    assert bench.guest.serving() == []
    assert bench.guest.json(f"{HOST} status")["services"]["main"]["stopped_by_hand"]["release"] == A
    assert bench.switch(A)["state"] == "refused"

    bench.run(f"{HOST} start-service main")

    bench.serves(A)


def test_going_back_names_and_restores_the_release_before(bench: Bench) -> None:
    bench.good(A)
    bench.release(B)
    bench.switch(B)
    way = bench.guest.json(f"{HOST} rollback main --dry")
    assert (way["from"]["name"], way["to"]["name"]) == (B, A)
    bench.run(f"{HOST} rollback main")
    assert bench.ended(A)["state"] == "switched"
    bench.serves(A)


def test_going_back_to_a_release_that_fails_now_leaves_the_one_that_serves(bench: Bench) -> None:
    bench.good(A)
    bench.release(B)
    bench.switch(B)
    bench.release(A, engine__env={"STUB_FAULT": "garbage"})

    bench.run(f"{HOST} rollback main")

    assert bench.ended(A)["state"] == "rolled-back"
    bench.serves(B)
    # It was no way back, so nothing says that B serves in place of another.
    assert not bench.guest.json(f"{HOST} status")["services"]["main"]["rolled_back"]


def test_there_is_no_way_back_to_a_release_whose_tree_is_gone(bench: Bench) -> None:
    bench.good(A)
    bench.release(B)
    bench.switch(B)
    bench.release(A, tree={"path": "/srv/spark/models/gone", "digest": "d" * 64})

    way = bench.guest.json(f"{HOST} rollback main || true")

    assert "/srv/spark/models/gone" in way["problem"]["where"]
    assert "set model: lab-stub and profile: v2" in way["problem"]["fix"]
    bench.serves(B)


def test_two_changes_at_once_are_refused(bench: Bench) -> None:
    bench.good(A)
    bench.release(B, engine__env={"STUB_LOAD_S": "3"})
    bench.release(C)
    bench.begin(B)
    bench.at_phase(B, "start")
    began = bench.run("date +%s").strip()
    bench.begin(C)
    bench.guest.wait(f"systemctl is-failed spark-switch@{C}", seconds=20)
    said = f"journalctl -u spark-switch@{C} --since @{began} -o cat"
    bench.guest.wait(f"{said} | grep -F 'rollout of main: another change is under way; fix: wait'")
    assert bench.ended(B)["state"] == "switched"
    bench.serves(B)


def test_a_second_engine_cannot_start_beside_the_first(bench: Bench) -> None:
    bench.good(A)
    bench.release(B, memory={"needed_bytes": 1, "wait_s": 1, "floor_bytes": 1})
    began = bench.run("date +%s").strip()
    bench.run(f"systemctl start spark-serve@{B}", check=False)
    said = f"journalctl -u spark-serve@{B} --since @{began} -o cat"
    bench.guest.wait(f"{said} | grep -F 'the engine of {A} runs on this host; fix: change over'")
    assert bench.guest.serving() == [f"spark-serve@{A}.service"]
    bench.run(f"systemctl stop spark-serve@{B}")
    bench.serves(A)


def test_clients_get_answers_or_a_clear_503_during_a_change(
    bench: Bench, record_property: Callable[[str, object], None]
) -> None:
    bench.good(A, engine__env={"STUB_PIECE_S": "0.05"})
    bench.release(B, engine__env={"STUB_PIECE_S": "0.05"})
    with clients(bench.guest, "main-model") as seen:
        there, back = bench.switch(B), bench.switch(A)

    assert (there["state"], back["state"]) == ("switched", "switched")
    assert {one.kind for one in seen} == {"right", "refused"}, [
        one.text for one in seen if one.kind == "other"
    ]
    for result in (there, back):
        record_property("outage_s", json.dumps(result["times_s"]))
        assert own_overhead_s(result["times_s"]) < 5.0, result["times_s"]
        assert_no_long_wait_of_ours(result["times_s"], max(outages_s(seen)))
    bench.serves(A)


def test_answers_longer_than_the_drain_are_cut_where_a_client_can_tell(bench: Bench) -> None:
    limits = {"start_s": 20, "stop_s": 2, "drain_s": 2}
    bench.good(A, engine__env={"STUB_PIECE_S": "0.05"}, timeouts=limits)  # 20 s for each of them
    bench.release(B)
    streamed = bench.ask_for_long(stream=True)
    whole = bench.ask_for_long(running=2)

    result = bench.switch(B)

    assert result["state"] == "switched"
    assert 2 <= result["times_s"]["drain"] < 5
    # A stream never ends as a finished one does: no [DONE], and curl's 18, "partial file".
    bench.guest.wait(f"grep -q ^rc= {streamed} && grep -q ^rc= {whole}")
    got = bench.run(f"cat {streamed}").split("\n")
    assert got[0].startswith("HTTP/1.1 200")
    assert sum(line.startswith("data: {") for line in got) > 10
    assert "data: [DONE]" not in got
    assert got[-1] == "rc=18"
    # An answer in one piece was not begun: the refusal that every client gets during a change.
    refused = bench.run(f"cat {whole}")
    assert refused.startswith("HTTP/1.1 503")
    assert "Retry-After: 10" in refused
    bench.serves(B)
