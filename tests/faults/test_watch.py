"""The watch on a guest: wedged, leaking and crashing engines end in a limit, not in a loop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.bench import A, Bench, install
from tests.labkit import Guest, info, lab

GUEST = os.environ.get("SPARK_BENCH_GUEST", "lab-3")
UNIT = f"spark-serve@{A}.service"


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    if os.geteuid() != 0:
        pytest.skip("the virtual lab needs root")
    lab("up", GUEST)
    address = next(guest["ip"] for guest in info()["guests"] if guest["name"] == GUEST)
    made = install(Guest(GUEST, address))
    yield made
    made.wipe()


def misbehave(bench: Bench, fault: str) -> None:
    """Have the running engine, and the ones after it, show a fault."""
    bench.write("/run/spark/main/stub-fault", fault)


def events(bench: Bench) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = bench.guest.json(
        "/usr/local/lib/spark/current/bin/spark-host status"
    )["events"]["main"]
    return found


def restarts(bench: Bench) -> int:
    return int(bench.run(f"systemctl show -p NRestarts --value {UNIT}"))


def test_a_wedged_engine_is_restarted_and_serves_again(bench: Bench) -> None:
    bench.good(A)
    misbehave(bench, "wedge")
    bench.ask_for_long()
    bench.guest.wait("grep -q stalled /var/lib/spark/events/main.jsonl", seconds=30)
    bench.run("rm /run/spark/main/stub-fault")
    bench.guest.wait(f"test $(systemctl show -p NRestarts --value {UNIT}) = 1", seconds=30)
    bench.guest.wait(f"systemctl is-active {UNIT}", seconds=30)
    bench.serves(A)
    assert "no token was read or written for" in events(bench)[-1]["text"]
    assert restarts(bench) == 1


def test_a_long_answer_is_not_taken_for_a_stall(bench: Bench) -> None:
    bench.good(A, engine__env={"STUB_PIECE_S": "0.05"})
    bench.ask_for_long()
    time.sleep(8)  # more than twice the stall limit, with the one request running all the time
    assert events(bench) == []
    assert restarts(bench) == 0


def test_a_starving_host_is_saved_by_stopping_the_engine(bench: Bench) -> None:
    available = int(bench.run("awk '/^MemAvailable:/ {print $2}' /proc/meminfo")) * 1024
    bench.good(A, memory={"needed_bytes": 1, "wait_s": 5, "floor_bytes": available - (2 << 30)})
    misbehave(bench, "leak")
    bench.guest.wait("grep -q starving /var/lib/spark/events/main.jsonl", seconds=90)
    bench.run("rm /run/spark/main/stub-fault")
    assert "GiB of memory are available, the floor is" in events(bench)[0]["text"]
    bench.guest.wait(f"systemctl is-active {UNIT}", seconds=60)


def test_an_engine_that_crashes_again_and_again_ends_at_the_start_limit(bench: Bench) -> None:
    bench.good(A, restart={"delay_s": 1, "burst": 3, "interval_s": 300})
    misbehave(bench, "crash-at-start")
    bench.run("docker kill spark-" + A)
    bench.guest.wait(f"systemctl is-failed {UNIT}", seconds=60)
    time.sleep(5)
    assert "Start request repeated too quickly" in bench.run(f"journalctl -u {UNIT} -n 8 -o cat")
    assert bench.run(f"systemctl show -p SubState --value {UNIT}") == "failed"
    assert bench.run("docker ps -aq") == ""
    # The host is well and its door answers clearly.
    status, _ = bench.guest.call("GET", "/health")
    assert status == 503
    # A start that a person or a deploy asks for is not held back by the limit.
    bench.run("rm /run/spark/main/stub-fault")
    assert bench.switch(A)["state"] == "switched"
    bench.serves(A)


def test_a_hot_gpu_is_an_event_and_nothing_is_stopped_for_it(bench: Bench) -> None:
    # The stand-in for nvidia-smi at the host's edge, read by the watch inside its unit.
    smi = bench.run("command -v nvidia-smi")
    bench.run(f'sed -i \'s/"temperature.gpu": "36"/"temperature.gpu": "95"/\' {smi}')
    try:
        bench.good(A, watch={"stall_s": 3, "interval_s": 0.5, "hot_celsius": 90})
        bench.guest.wait("grep -q '\"hot\"' /var/lib/spark/events/main.jsonl", seconds=40)
    finally:
        bench.run(f'sed -i \'s/"temperature.gpu": "95"/"temperature.gpu": "36"/\' {smi}')
    assert "the GPU is at 95 °C (limit 90 °C), clock 208 MHz" in events(bench)[-1]["text"]
    bench.serves(A)
    assert restarts(bench) == 0


def test_a_restart_of_docker_brings_the_server_back(bench: Bench) -> None:
    bench.good(A)
    bench.run("systemctl restart docker")
    bench.guest.wait(f"test $(systemctl show -p NRestarts --value {UNIT}) -ge 1", seconds=30)
    bench.guest.wait(f"systemctl is-active {UNIT}", seconds=60)
    bench.serves(A)


def test_an_upgrade_of_docker_brings_the_server_back(bench: Bench) -> None:
    bench.good(A)
    bench.run("systemctl stop docker.socket docker; sleep 3; systemctl start docker")
    bench.guest.wait(f"systemctl is-active {UNIT} && docker ps | grep -q {A}", seconds=90)
    bench.serves(A)


def test_a_foreign_prune_takes_nothing_of_a_running_server(bench: Bench) -> None:
    bench.good(A)
    bench.run("docker system prune -af --volumes >/dev/null")
    bench.serves(A)
    bench.run(f"systemctl restart {UNIT}")
    bench.serves(A)
