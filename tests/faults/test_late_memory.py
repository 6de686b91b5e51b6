"""On a Spark memory comes back long after a process is gone: a change waits, or goes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.bench import A, B, Bench

GIB = 1 << 30
# Half of it is the margin for what else happens on the machine that the guests share.
HELD = 3 * GIB
HOLDER = f"import time; kept = b'x' * {HELD}; print('held', flush=True); time.sleep(600)"


def available(bench: Bench) -> int:
    return int(bench.run("awk '/^MemAvailable:/ {print $2}' /proc/meminfo")) * 1024


@contextmanager
def neighbour(bench: Bench) -> Iterator[None]:
    """Have another program hold memory during a block."""
    bench.run(f'systemd-run -q --collect --unit neighbour python3 -c "{HOLDER}"')
    # The whole line: the one with which systemd names the program it starts has the word, too.
    bench.guest.wait("journalctl -u neighbour -o cat | tail -n 1 | grep -qx held")
    try:
        yield
    finally:
        bench.run("systemctl stop neighbour")


def wants(needed_bytes: int, wait_s: float) -> dict[str, float]:
    return {"needed_bytes": needed_bytes, "wait_s": wait_s, "floor_bytes": 1 << 27}


def test_memory_that_comes_back_late_is_waited_for(bench: Bench) -> None:
    bench.good(A)
    bench.release(B, memory=wants(available(bench) - HELD // 2, 60))
    with neighbour(bench):
        bench.begin(B)
        bench.at_phase(B, "memory")
        time.sleep(5)
        waiting = bench.result(B)
        refused, _ = bench.guest.call("GET", "/health")
        assert bench.guest.serving() == []

    result = bench.ended(B)

    assert (waiting["phase"], waiting["state"], refused) == ("memory", "running", 503)
    assert "GiB available" in waiting["progress"]
    assert result["state"] == "switched", result["reason"]
    assert result["times_s"]["memory"] > 5
    bench.serves(B)


def test_memory_that_stays_away_sends_the_change_back(bench: Bench) -> None:
    bench.good(A)
    bench.release(B, memory=wants(available(bench) - HELD // 2, 4))
    with neighbour(bench):
        result = bench.switch(B)

        assert (result["state"], result["serving"]) == ("rolled-back", A), result
        assert result["failed_phase"] == "memory"
        # Who holds it is named, so that a person can act.
        assert "python3 (pid" in result["reason"]
        assert "3.0 GiB)" in result["reason"]
        assert 4 <= result["times_s"]["memory"] < 10
        bench.serves(A)


def test_a_server_that_could_not_go_back_comes_back_with_the_memory(bench: Bench) -> None:
    wanted = wants(available(bench) - HELD // 2, 3)
    bench.good(A, memory=wanted, restart={"delay_s": 3, "burst": 20, "interval_s": 300})
    bench.release(B, memory=wanted)
    with neighbour(bench):
        result = bench.switch(B)

        assert result["state"] == "rollback-failed", result
        assert "and the old release: " in result["reason"]
        assert bench.guest.serving() == []
        assert bench.guest.boots() == [f"spark-serve@{A}.service"]
        assert bench.guest.call("GET", "/health")[0] == 503

    # Nobody does anything: systemd goes on trying within the start limits.
    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)
    bench.serves(A)


@contextmanager
def container_that_stays(bench: Bench) -> Iterator[None]:
    """Have Docker fail to end the engine of A, as with a process that the kernel does not let go.

    What would end it is stopped itself; docker says so at once, where it would hang for minutes.
    """
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
        bench.run(
            f"rm -r {' '.join(drop_ins)} /run/bench; systemctl daemon-reload; kill -CONT {shim}"
        )


def test_beside_a_container_that_cannot_be_removed_nothing_is_started(bench: Bench) -> None:
    soon = wants(1 << 28, 4)
    bench.good(A, memory=soon, restart={"delay_s": 3, "burst": 20, "interval_s": 300})
    bench.release(B, memory=soon)
    with container_that_stays(bench):
        result = bench.switch(B)

        assert (result["state"], result["failed_phase"]) == ("rollback-failed", "memory"), result
        assert f"container spark-{A} is still there after 4 s" in result["reason"]
        assert f"fix: docker rm -f spark-{A}" in result["reason"]
        assert "and the old release: " in result["reason"]
        assert bench.guest.serving() == []
        assert bench.guest.boots() == [f"spark-serve@{A}.service"]
        assert bench.run("docker ps -a --format '{{.Names}}'") == f"spark-{A}"
        assert bench.guest.call("GET", "/health")[0] == 503

    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)
    bench.serves(A)
