import time
from contextlib import contextmanager

from tests.faults.bench import A, B

GIB = 1 << 30
HELD = 3 * GIB
HOLDER = f"import time; kept = b'x' * {HELD}; print('held', flush=True); time.sleep(600)"


@contextmanager
def memory_hog(bench):
    bench.run(f'systemd-run -q --collect --unit memory_hog python3 -c "{HOLDER}"')
    bench.guest.wait("journalctl -u memory_hog -o cat | tail -n 1 | grep -qx held")
    try:
        yield
    finally:
        bench.run("systemctl stop memory_hog")


def memory_needs(needed_bytes, wait_s):
    return {"needed_bytes": needed_bytes, "wait_s": wait_s, "floor_bytes": 1 << 27}


def needs_more_than_left(bench, wait_s):
    """Return needs that the host meets only while the memory hog does not run."""
    return memory_needs(bench.memory_bytes("MemAvailable") - HELD // 2, wait_s)


def test_rollout_waits_until_memory_is_free(bench):
    bench.serve_proven(A)
    bench.release(B, memory=needs_more_than_left(bench, 60))
    with memory_hog(bench):
        bench.start_switch(B)
        bench.wait_for_phase(B, "memory")
        time.sleep(5)
        waiting = bench.result(B)
        refused, _ = bench.guest.call("GET", "/health")
        assert bench.guest.serving() == []

    result = bench.wait_for_result(B)

    assert (waiting["phase"], waiting["state"], refused) == ("memory", "running", 503)
    assert result["state"] == "switched", result["reason"]
    assert result["times_s"]["memory"] > 5
    bench.assert_serves(B)


def test_rollout_rolls_back_if_memory_stays_in_use(bench):
    bench.serve_proven(A)
    bench.release(B, memory=needs_more_than_left(bench, 4))
    with memory_hog(bench):
        result = bench.switch(B)

        assert (result["state"], result["serving"]) == ("rolled-back", A), result
        assert result["failed_phase"] == "memory"
        assert "python3 (pid" in result["reason"]
        assert 4 <= result["times_s"]["memory"] < 10
        bench.assert_serves(A)


def assert_down_until_next_start(bench):
    assert bench.guest.serving() == []
    assert bench.guest.boots() == [f"spark-serve@{A}.service"]
    assert bench.guest.call("GET", "/health")[0] == 503


def wait_until_restarted(bench):
    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)
    bench.assert_serves(A)


def test_failed_rollback_recovers_once_memory_is_free(bench):
    needs = needs_more_than_left(bench, 3)
    bench.serve_proven(A, memory=needs, restart={"delay_s": 3, "burst": 20, "interval_s": 300})
    bench.release(B, memory=needs)
    with memory_hog(bench):
        result = bench.switch(B)

        assert result["state"] == "rollback-failed", result
        assert_down_until_next_start(bench)
    wait_until_restarted(bench)


@contextmanager
def unremovable_container(bench):
    """Simulate an engine process stuck in the kernel: Docker fails at once instead of hanging."""
    shim = bench.run("pgrep -f [c]ontainerd-shim.*$(docker ps -q --no-trunc)")
    bench.write(
        "/run/bench/docker",
        '#!/bin/sh\ncase $1 in stop|rm) echo "did not receive an exit event" >&2; exit 1;; esac\n'
        'exec /usr/bin/docker "$@"',
    )
    drop_ins = [
        f"/etc/systemd/system/{unit}.service.d/60-bench.conf"
        for unit in ("spark-switch@", f"spark-serve@{A}")
    ]
    for drop_in in drop_ins:
        bench.write(drop_in, "[Service]\nEnvironment=PATH=/run/bench:/usr/sbin:/usr/bin:/sbin:/bin")
    bench.write(drop_ins[1].replace("60", "61"), "[Service]\nTimeoutStopSec=5")
    bench.run(f"chmod 755 /run/bench/docker; systemctl daemon-reload; kill -STOP {shim}")
    try:
        yield
    finally:
        bench.run(f"rm -r {' '.join(drop_ins)} /run/bench; systemctl daemon-reload; "
                  f"kill -CONT {shim}")  # fmt: skip


def test_no_engine_starts_while_old_container_cannot_be_removed(bench):
    soon = memory_needs(1 << 28, 4)
    bench.serve_proven(A, memory=soon, restart={"delay_s": 3, "burst": 20, "interval_s": 300})
    bench.release(B, memory=soon)
    with unremovable_container(bench):
        result = bench.switch(B)

        assert (result["state"], result["failed_phase"]) == ("rollback-failed", "memory"), result
        assert_down_until_next_start(bench)
        assert bench.run("docker ps -a --format '{{.Names}}'") == f"spark-{A}"
    wait_until_restarted(bench)
