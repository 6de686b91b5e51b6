import time

import pytest

from tests.faults.bench import FAULT, LASTING, A, B

UNIT = f"spark-serve@{A}.service"
WATCH = f"spark-watch@{A}.service"
EVENTS = "/var/lib/spark/events/main.jsonl"
SHORT = {"delay_s": 3, "burst": 3, "interval_s": 300}


def inject(bench, fault, *, lasting=False):
    if lasting:
        bench.write(LASTING, fault)
    bench.write(FAULT, fault)


def heal(bench):
    bench.run(f"rm -f {FAULT} {LASTING}")


def event_kinds(bench):
    return [event["kind"] for event in bench.status()["events"]["main"]]


def restarts(bench):
    return int(bench.run(f"systemctl show -p NRestarts --value {UNIT}"))


def wait_for_restart(bench):
    bench.guest.wait(f"test $(systemctl show -p NRestarts --value {UNIT}) -ge 1", seconds=30)
    bench.guest.wait(f"systemctl is-active {UNIT}", seconds=60)
    bench.assert_serves(A)


def memory_limits(bench, gib=2):
    floor_bytes = bench.memory_bytes("MemAvailable") - (gib << 30)
    return {"needed_bytes": 1, "wait_s": 5, "floor_bytes": floor_bytes}


def serve_with_three_starts(bench, **changes):
    bench.serve_proven(A, restart=SHORT, **changes)
    bench.run(f"systemctl reset-failed {UNIT}; systemctl restart {UNIT}")


def assert_start_limit_reached(bench):
    bench.guest.wait(f"systemctl is-failed {UNIT}", seconds=240)
    count = restarts(bench)
    assert count == SHORT["burst"]
    time.sleep(2 * SHORT["delay_s"])
    assert bench.guest.unit(UNIT, "ActiveState", "SubState", "NRestarts") == {
        "ActiveState": "failed", "SubState": "failed", "NRestarts": str(count)
    }  # fmt: skip
    assert "Start request repeated too quickly" in bench.run(f"journalctl -u {UNIT} -n 8 -o cat")
    units = "systemctl list-units --no-legend --state=active,activating,reloading 'spark-s*@*' "
    left = bench.run(f"docker ps -aq; systemctl list-jobs --no-legend; {units} 'spark-watch@*'")
    assert left == ""
    assert bench.guest.call("GET", "/health")[0] == 503
    began = time.monotonic()
    bench.run("true")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("fault", "event"), [("wedge", "stalled"), ("leak", "starving")])
def test_watchdog_restarts_hung_or_leaking_engine(bench, fault, event):
    bench.serve_proven(A, **({"memory": memory_limits(bench)} if fault == "leak" else {}))
    before = bench.guest.invocation(A)
    inject(bench, fault)
    if fault == "wedge":
        bench.start_long_request()
    bench.guest.wait(f"grep -q {event} {EVENTS}", seconds=90)
    heal(bench)
    wait_for_restart(bench)
    assert event_kinds(bench) == [event]
    assert restarts(bench) == 1
    assert bench.guest.invocation(A) != before


def test_engine_that_hangs_after_every_start_reaches_start_limit(bench):
    serve_with_three_starts(bench)
    for start in range(1, SHORT["burst"] + 1):
        bench.guest.wait(f"systemctl is-active {UNIT} && systemctl is-active {WATCH}", seconds=60)
        bench.assert_serves(A)
        inject(bench, "wedge")
        bench.start_long_request()
        bench.guest.wait(f"test $(grep -c '\"stalled\"' {EVENTS}) = {start}", seconds=30)
        heal(bench)
    assert_start_limit_reached(bench)


def test_watchdog_does_not_treat_a_long_response_as_a_stall(bench):
    bench.serve_proven(A, engine__env={"STUB_PIECE_S": "0.05"})
    bench.start_long_request()
    time.sleep(8)
    assert event_kinds(bench) == []
    assert restarts(bench) == 0


def test_rollout_rolls_back_if_engine_needs_more_memory_than_the_host_has(bench):
    bench.serve_proven(A)
    before = bench.guest.invocation(A)
    timeouts = {"start_s": 60, "stop_s": 5, "drain_s": 5}
    limits, greedy = memory_limits(bench, gib=1), {"STUB_FAULT": "greedy-load"}
    bench.release(B, memory=limits, timeouts=timeouts, engine__env=greedy)

    result = bench.switch(B, seconds=200)

    assert (result["state"], result["serving"]) == ("rolled-back", A), result
    assert result["failed_phase"] == "start", result
    assert event_kinds(bench) == ["starving"]
    assert bench.run(f"systemctl show -p NRestarts --value spark-serve@{B}") == "0"
    bench.assert_serves(A)
    assert bench.guest.invocation(A) != before
    memory = bench.release_status(A)["proof"]["start_memory"]
    assert memory["floor_bytes"] == 1 << 27
    assert memory["lowest_bytes"] > 1 << 30


@pytest.mark.parametrize(
    ("fault", "events"),
    [("crash-at-start", 0), ("greedy-load", SHORT["burst"] - 1), ("leak", SHORT["burst"])],
)
def test_engine_that_fails_repeatedly_reaches_start_limit(bench, fault, events):
    serve_with_three_starts(bench, memory=memory_limits(bench))
    inject(bench, fault, lasting=True)
    if fault != "leak":
        bench.run("docker kill spark-" + A)
    assert_start_limit_reached(bench)
    assert event_kinds(bench).count("starving") == events
    heal(bench)
    bench.assert_switches(A)


def test_overheating_gpu_is_reported_without_engine_restart(bench):
    smi = bench.run("command -v nvidia-smi")
    bench.run(f'sed -i \'s/"temperature.gpu": "36"/"temperature.gpu": "95"/\' {smi}')
    try:
        bench.serve_proven(A, watch={"stall_s": 3, "interval_s": 0.5, "hot_celsius": 90})
        bench.guest.wait(f"grep -q '\"hot\"' {EVENTS}", seconds=40)
    finally:
        bench.run(f'sed -i \'s/"temperature.gpu": "95"/"temperature.gpu": "36"/\' {smi}')
    bench.assert_serves(A)
    assert restarts(bench) == 0


def test_server_starts_again_after_docker_restarts(bench):
    bench.serve_proven(A)
    bench.run("systemctl restart docker")
    wait_for_restart(bench)


def test_docker_upgrade_restarts_server_and_next_rollout_checks_it(bench):
    bench.serve_proven(A)
    before = bench.guest.invocation(A)
    # A daemon upgrade leaves a proof of another version, and a reinstalled package.
    proof = f"/var/lib/spark/proofs/{A}.json"
    version = bench.run("docker version -f '{{.Server.Version}}'")
    bench.run(f'sed -i \'s/"docker": "{version}"/"docker": "20.10.1"/\' {proof}')
    again = "apt-get -qq -y install --reinstall docker.io"
    bench.run(f"DEBIAN_FRONTEND=noninteractive {again} 2>&1 && systemctl restart docker",
              timeout_s=180)  # fmt: skip

    bench.guest.wait(f"test $(systemctl show -p InvocationID --value {UNIT}) != {before}")
    bench.guest.wait(f"systemctl is-active {UNIT}", seconds=90)
    bench.assert_serves(A)
    status = bench.release_status(A)
    assert status["proof"]["level"] == "quick"
    assert f"docker 20.10.1 -> {version}" in status["unproven"]
    invocation = bench.guest.invocation(A)
    bench.assert_switches(A)
    assert bench.guest.invocation(A) == invocation
    status = bench.release_status(A)
    assert (status["unproven"], status["proof"]["level"]) == (None, "full")
    assert status["proof"]["last_full"]["versions"]["docker"] == version


def test_docker_prune_does_not_remove_the_running_server(bench):
    bench.serve_proven(A)
    bench.run("docker system prune -af --volumes >/dev/null")
    bench.assert_serves(A)
    bench.run(f"systemctl restart {UNIT}")
    bench.assert_serves(A)
