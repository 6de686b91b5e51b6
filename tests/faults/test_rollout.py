import json
import time

import pytest

from tests.clients import assert_short_waits, clients, outages_s, overhead_s
from tests.faults.bad_releases import BAD_RELEASES
from tests.faults.bench import SPARK_HOST, A, B, C


def test_rollout_switches_to_another_release_and_back(bench):
    bench.serve_proven(A)
    bench.release(B, engine__argv=["--kv-cache-dtype", "fp8"])
    bench.assert_switches(B)
    assert 'cache_dtype="fp8"' in bench.guest.metrics()
    bench.assert_switches(A)


def test_switch_to_the_release_already_serving_restarts_nothing(bench):
    bench.serve_proven(A)
    before = bench.guest.invocation(A)
    bench.assert_switches(A)
    assert bench.guest.invocation(A) == before


def nearly_all_memory(bench):
    return bench.memory_bytes("MemTotal") - (64 << 20)


@pytest.mark.parametrize("case", BAD_RELEASES)
def test_faulty_release_is_rolled_back(bench, case):
    changes, phase = BAD_RELEASES[case].release, BAD_RELEASES[case].phase
    if f"spark-serve@{A}.service" not in bench.guest.serving():
        bench.serve_proven(A)
    if case == "memory in use by others":
        changes = {"memory__needed_bytes": nearly_all_memory(bench), **changes}
    bench.release(B, **changes)

    result = bench.switch(B)

    assert result["state"] == ("refused" if phase == "prove" else "rolled-back")
    assert (result["failed_phase"], result["serving"]) == (phase, A)
    assert result["reason"]
    bench.assert_serves(A)


def test_faulty_first_release_leaves_nothing_running_or_enabled(bench):
    bench.wipe()
    bench.release(B, engine__env={"STUB_FAULT": "garbage"})

    result = bench.switch(B)

    assert result["state"] == "failed-no-previous"
    assert (bench.guest.serving(), bench.guest.boots()) == ([], [])
    assert bench.run("docker ps -aq") == ""
    assert bench.run("systemctl is-system-running || true") in ("running", "degraded")


def test_rollout_result_contains_log_of_failed_start(bench):
    bench.serve_proven(A)
    bench.release(B, engine__env={"STUB_FAULT": "oom-at-start"})
    tail = "\n".join(bench.switch(B)["log_tail"])
    assert "Free memory on device cuda:0 (10.53/121.69 GiB)" in tail


# The systemctl call to block in each phase; in the other phases the slow engine takes long enough.
BLOCKED_CALL = {
    "stop": f"stop spark-serve@{A}",
    "open": "show * spark-gateway@main",
    "enable": f"enable spark-serve@{B}",
}
SLOW = {"STUB_PIECE_S": "0.05"}


def switch_until_phase(bench, phase):
    bench.serve_proven(A, engine__env=SLOW)
    memory = {"memory__needed_bytes": nearly_all_memory(bench)} if phase == "memory" else {}
    bench.release(B, engine__env={"STUB_LOAD_S": "3", **SLOW}, **memory)
    bench.unblock_systemctl()
    if phase in BLOCKED_CALL:
        bench.block_systemctl(BLOCKED_CALL[phase])
    if phase == "drain":
        bench.start_long_request()
    bench.start_switch(B)
    bench.wait_for_phase(B, phase)


@pytest.mark.parametrize("phase", ["drain", "stop", "memory", "start", "check", "open", "enable"])
def test_killed_rollout_resumes_and_ends_with_a_server_that_passed_its_check(bench, phase):
    switch_until_phase(bench, phase)

    bench.run(f"systemctl kill -s KILL spark-switch@{B}")

    bench.unblock_systemctl()
    result = bench.wait_for_result(B)
    finished = phase in ("open", "enable")
    assert result["state"] == ("switched" if finished else "rolled-back")
    bench.assert_serves(B if finished else A)


def test_rollout_killed_during_enable_rolls_back_if_the_retry_fails(bench):
    switch_until_phase(bench, "enable")
    bench.fail_systemctl(BLOCKED_CALL["enable"], "Read-only file system")

    bench.run(f"systemctl kill -s KILL spark-switch@{B}; systemctl daemon-reload")

    try:
        result = bench.wait_for_result(B)
    finally:
        bench.unblock_systemctl()
    assert (result["state"], result["failed_phase"]) == ("rolled-back", "enable")
    assert "Read-only file system" in result["reason"]
    bench.assert_serves(A)


def test_old_release_continues_to_serve_if_systemd_cannot_stop_it(bench):
    bench.serve_proven(A)
    bench.release(B)
    before = bench.guest.invocation(A)
    unstoppable = f"/etc/systemd/system/spark-serve@{A}.service.d/99-bench.conf"
    bench.write(unstoppable, "[Unit]\nRefuseManualStop=yes")
    bench.run("systemctl daemon-reload")
    try:
        result = bench.switch(B)
    finally:
        bench.run(f"rm {unstoppable}; systemctl daemon-reload")

    assert (result["state"], result["failed_phase"]) == ("rolled-back", "stop")
    assert bench.guest.invocation(A) == before
    bench.assert_serves(A)


@pytest.mark.parametrize("phase", ["stop", "start", "check", "enable"])
def test_host_boots_old_release_after_power_cut_during_rollout(bench, phase):
    switch_until_phase(bench, phase)

    bench.power_cut()

    bench.unblock_systemctl()
    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)
    assert bench.guest.serving() == [f"spark-serve@{A}.service"]
    assert bench.answers()
    assert bench.guest.json(f"{SPARK_HOST} switch-poll {B}")["state"] == "interrupted"
    bench.assert_switches(B)


def test_proven_release_starts_again_after_power_cut(bench):
    bench.serve_proven(A)
    bench.power_cut()
    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)
    bench.assert_serves(A)
    status = bench.release_status(A)
    assert (status["unproven"], status["proof"]["level"]) == (None, "quick")


def test_only_the_last_known_good_release_boots_if_two_are_enabled(bench):
    bench.serve_proven(A)
    bench.release(B)
    bench.run(f"systemctl enable -q spark-serve@{B}")
    bench.power_cut()
    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)
    assert bench.guest.serving() == [f"spark-serve@{A}.service"]


def test_service_stopped_by_hand_stays_down_after_reboot(bench):
    bench.serve_proven(A)
    bench.run(f"{SPARK_HOST} stop-service main")
    bench.power_cut()
    time.sleep(3)
    assert bench.guest.serving() == []
    assert bench.status()["services"]["main"]["stopped_by_hand"]["release"] == A
    assert bench.switch(A)["state"] == "refused"

    bench.run(f"{SPARK_HOST} start-service main")

    bench.assert_serves(A)


def switch_from_a_to_b(bench):
    bench.serve_proven(A)
    bench.release(B)
    bench.assert_switches(B)


def test_rollback_restores_previous_release(bench):
    switch_from_a_to_b(bench)
    plan = bench.guest.json(f"{SPARK_HOST} rollback main --dry")
    assert (plan["from"]["name"], plan["to"]["name"]) == (B, A)
    bench.run(f"{SPARK_HOST} rollback main")
    assert bench.wait_for_result(A)["state"] == "switched"
    bench.assert_serves(A)


def test_current_release_keeps_serving_if_rollback_fails(bench):
    switch_from_a_to_b(bench)
    bench.release(A, engine__env={"STUB_FAULT": "garbage"})

    bench.run(f"{SPARK_HOST} rollback main")

    assert bench.wait_for_result(A)["state"] == "rolled-back"
    bench.assert_serves(B)
    assert not bench.status()["services"]["main"]["rolled_back"]


def test_rollback_rejects_release_without_checkpoint(bench):
    switch_from_a_to_b(bench)
    bench.release(A, tree={"path": "/srv/spark/models/gone", "digest": "d" * 64})

    plan = bench.guest.json(f"{SPARK_HOST} rollback main || true")

    assert "/srv/spark/models/gone" in plan["problem"]["where"]
    assert plan["problem"]["fix"]
    bench.assert_serves(B)


def test_second_rollout_is_rejected_while_one_is_running(bench):
    bench.serve_proven(A)
    bench.release(B, engine__env={"STUB_LOAD_S": "3"})
    bench.release(C)
    bench.start_switch(B)
    bench.wait_for_phase(B, "start")
    began = bench.run("date +%s").strip()
    bench.start_switch(C)
    bench.guest.wait(f"systemctl is-failed spark-switch@{C}", seconds=20)
    log = f"journalctl -u spark-switch@{C} --since @{began} -o cat"
    bench.guest.wait(f"{log} | grep -F 'rollout of main: '")
    assert bench.wait_for_result(B)["state"] == "switched"
    bench.assert_serves(B)


def test_second_engine_cannot_start_while_one_serves(bench):
    bench.serve_proven(A)
    bench.release(B, memory={"needed_bytes": 1, "wait_s": 1, "floor_bytes": 1})
    began = bench.run("date +%s").strip()
    bench.run(f"systemctl start spark-serve@{B}", check=False)
    log = f"journalctl -u spark-serve@{B} --since @{began} -o cat"
    bench.guest.wait(f"{log} | grep -F 'the engine of {A} is running on this host'")
    assert bench.guest.serving() == [f"spark-serve@{A}.service"]
    bench.run(f"systemctl stop spark-serve@{B}")
    bench.assert_serves(A)


def test_clients_get_answers_or_503_during_rollout(bench, record_property):
    bench.serve_proven(A, engine__env=SLOW)
    bench.release(B, engine__env=SLOW)
    with clients(bench.guest, "main-model") as seen:
        results = [bench.switch(B), bench.switch(A)]

    assert [result["state"] for result in results] == ["switched", "switched"]
    assert {answer.kind for answer in seen} == {"right", "refused"}, [
        answer.text for answer in seen if answer.kind == "other"
    ]
    for result in results:
        record_property("outage_s", json.dumps(result["times_s"]))
        assert overhead_s(result["times_s"]) < 5.0, result["times_s"]
        assert_short_waits(result["times_s"], max(outages_s(seen)))
    bench.assert_serves(A)


def test_response_cut_off_after_the_drain_time_is_visibly_incomplete(bench):
    limits = {"start_s": 20, "stop_s": 2, "drain_s": 2}
    bench.serve_proven(A, engine__env=SLOW, timeouts=limits)
    bench.release(B)
    streamed = bench.start_long_request(stream=True)
    whole = bench.start_long_request(running=2)

    result = bench.switch(B)

    assert result["state"] == "switched"
    assert 2 <= result["times_s"]["drain"] < 5
    # A cut stream differs from a complete stream: no [DONE], and curl's error 18, "partial file".
    bench.guest.wait(f"grep -q ^rc= {streamed} && grep -q ^rc= {whole}")
    lines = bench.run(f"cat {streamed}").split("\n")
    assert lines[0].startswith("HTTP/1.1 200")
    assert sum(line.startswith("data: {") for line in lines) > 10
    assert "data: [DONE]" not in lines
    assert lines[-1] == "rc=18"
    refused = bench.run(f"cat {whole}")
    assert refused.startswith("HTTP/1.1 503")
    assert "Retry-After: 10" in refused
    bench.assert_serves(B)
