"""The watch on a guest: wedged, leaking and crashing engines end in a limit, not in a loop."""

from __future__ import annotations

import time
from typing import Any

from tests.faults.bench import FAULT, HOST, LASTING, A, B, Bench

UNIT = f"spark-serve@{A}.service"
WATCH = f"spark-watch@{A}.service"
# Three starts, and none is left after them.
SHORT = {"delay_s": 3, "burst": 3, "interval_s": 300}


def misbehave(bench: Bench, fault: str, *, lasting: bool = False) -> None:
    """Have the running engine show a fault, and with ``lasting`` the ones after it as well."""
    if lasting:
        bench.write(LASTING, fault)
    bench.write(FAULT, fault)


def events(bench: Bench) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = bench.guest.json(f"{HOST} status")["events"]["main"]
    return found


def restarts(bench: Bench) -> int:
    return int(bench.run(f"systemctl show -p NRestarts --value {UNIT}"))


def run_of(bench: Bench) -> str:
    """Return the identity of the engine's present run, by systemd's word."""
    return bench.run(f"systemctl show -p InvocationID --value {UNIT}")


def room_below(bench: Bench, gib: int = 2) -> dict[str, int]:
    """Return limits under which an engine may grow by so much before the host starves."""
    available = int(bench.run("awk '/^MemAvailable:/ {print $2}' /proc/meminfo")) * 1024
    return {"needed_bytes": 1, "wait_s": 5, "floor_bytes": available - (gib << 30)}


def with_three_starts(bench: Bench, **changes: Any) -> None:
    """Have an engine in the first of the three starts that it has.

    A change of release reloads systemd, which counts from nothing then.
    """
    bench.good(A, restart=SHORT, **changes)
    bench.run(f"systemctl reset-failed {UNIT}; systemctl restart {UNIT}")


def ended_by_the_limit(bench: Bench) -> None:
    """Insist that nothing is started any more and that the host is as usable as before."""
    bench.guest.wait(f"systemctl is-failed {UNIT}", seconds=240)
    counted = restarts(bench)
    assert counted == SHORT["burst"]  # the last one was refused
    time.sleep(2 * SHORT["delay_s"])
    assert bench.guest.unit(UNIT, "ActiveState", "SubState", "NRestarts") == {
        "ActiveState": "failed", "SubState": "failed", "NRestarts": str(counted)
    }  # fmt: skip
    assert "Start request repeated too quickly" in bench.run(f"journalctl -u {UNIT} -n 8 -o cat")
    # Nothing of ours runs or waits, the door says why, and a new login is served at once.
    ours = "systemctl list-units --no-legend --state=active,activating,reloading 'spark-s*@*' "
    left = bench.run(f"docker ps -aq; systemctl list-jobs --no-legend; {ours} 'spark-watch@*'")
    assert left == ""
    assert bench.guest.call("GET", "/health")[0] == 503
    begun = time.monotonic()
    bench.run("true")
    assert time.monotonic() - begun < 5


def test_a_wedged_engine_is_restarted_and_serves_again(bench: Bench) -> None:
    bench.good(A)
    before = run_of(bench)
    misbehave(bench, "wedge")
    bench.ask_for_long()
    bench.guest.wait("grep -q stalled /var/lib/spark/events/main.jsonl", seconds=30)
    bench.run(f"rm -f {FAULT} {LASTING}")
    bench.guest.wait(f"test $(systemctl show -p NRestarts --value {UNIT}) = 1", seconds=30)
    bench.guest.wait(f"systemctl is-active {UNIT}", seconds=30)
    bench.serves(A)
    assert "no token was read or written for" in events(bench)[-1]["text"]
    assert restarts(bench) == 1
    assert run_of(bench) != before


def test_an_engine_that_wedges_after_every_start_ends_at_the_start_limit(bench: Bench) -> None:
    with_three_starts(bench)
    for start in range(1, SHORT["burst"] + 1):
        bench.guest.wait(f"systemctl is-active {UNIT} && systemctl is-active {WATCH}", seconds=60)
        bench.serves(A)
        # Proven, and wedged only then: nothing but the watch can see it.
        misbehave(bench, "wedge")
        bench.ask_for_long()
        bench.guest.wait(
            f"test $(grep -c '\"stalled\"' /var/lib/spark/events/main.jsonl) = {start}", seconds=30
        )
        bench.run(f"rm -f {FAULT} {LASTING}")
    ended_by_the_limit(bench)


def test_a_long_answer_is_not_taken_for_a_stall(bench: Bench) -> None:
    bench.good(A, engine__env={"STUB_PIECE_S": "0.05"})
    bench.ask_for_long()
    time.sleep(8)  # more than twice the stall limit, with the one request running all the time
    assert events(bench) == []
    assert restarts(bench) == 0


def test_a_starving_host_is_saved_by_stopping_the_engine(bench: Bench) -> None:
    bench.good(A, memory=room_below(bench))
    before = run_of(bench)
    misbehave(bench, "leak")
    bench.guest.wait("grep -q starving /var/lib/spark/events/main.jsonl", seconds=90)
    bench.run(f"rm -f {FAULT} {LASTING}")
    assert "GiB of memory are available, the floor is" in events(bench)[0]["text"]
    bench.guest.wait(f"test $(systemctl show -p NRestarts --value {UNIT}) = 1", seconds=30)
    bench.guest.wait(f"systemctl is-active {UNIT}", seconds=60)
    bench.serves(A)
    assert restarts(bench) == 1
    assert run_of(bench) != before
    assert [event["kind"] for event in events(bench)] == ["starving"]


def test_an_engine_that_loads_more_than_the_host_can_give_goes_back_to_the_old_release(
    bench: Bench,
) -> None:
    bench.good(A)
    before = run_of(bench)
    patient = {"start_s": 60, "stop_s": 5, "drain_s": 5}
    room, greedy = room_below(bench, gib=1), {"STUB_FAULT": "greedy-load"}
    bench.release(B, memory=room, timeouts=patient, engine__env=greedy)

    result = bench.switch(B, seconds=200)

    assert (result["state"], result["serving"]) == ("rolled-back", A), result
    assert result["failed_phase"] == "start", result
    assert result["reason"].startswith("memory: ")
    assert "the floor is" in result["reason"]
    assert "while it started; fix: lower engine.memory_fraction" in result["reason"]
    assert [event["kind"] for event in events(bench)] == ["starving"]
    # It was tried once, and left nothing.
    assert bench.run(f"systemctl show -p NRestarts --value spark-serve@{B}") == "0"
    bench.serves(A)
    assert run_of(bench) != before
    told = bench.told(A)["proof"]["start_memory"]
    assert told["floor_bytes"] == 1 << 27
    assert told["lowest_bytes"] > 1 << 30


def test_an_engine_that_loads_too_much_at_every_start_ends_at_the_start_limit(bench: Bench) -> None:
    with_three_starts(bench, memory=room_below(bench))
    misbehave(bench, "greedy-load", lasting=True)
    bench.run("docker kill spark-" + A)
    ended_by_the_limit(bench)
    starving = [event for event in events(bench) if event["kind"] == "starving"]
    assert len(starving) == SHORT["burst"] - 1  # the first start was well
    assert bench.guest.call("GET", "/health")[0] == 503


def test_an_engine_that_leaks_after_every_start_ends_at_the_start_limit(bench: Bench) -> None:
    with_three_starts(bench, memory=room_below(bench))
    misbehave(bench, "leak", lasting=True)
    ended_by_the_limit(bench)
    assert [event["kind"] for event in events(bench)] == ["starving"] * SHORT["burst"]


def test_an_engine_that_crashes_again_and_again_ends_at_the_start_limit(bench: Bench) -> None:
    with_three_starts(bench)
    misbehave(bench, "crash-at-start", lasting=True)
    bench.run("docker kill spark-" + A)
    ended_by_the_limit(bench)
    # A start that a person or a deploy asks for is not held back by the limit.
    bench.run(f"rm -f {FAULT} {LASTING}")
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


def test_an_upgrade_of_docker_brings_the_server_back_and_is_proven_again(bench: Bench) -> None:
    bench.good(A)
    before = run_of(bench)
    # What a daemon upgrade leaves: a proof of another version, and the package laid out anew.
    proof = f"/var/lib/spark/proofs/{A}.json"
    version = bench.run("docker version -f '{{.Server.Version}}'")
    bench.run(f'sed -i \'s/"docker": "{version}"/"docker": "20.10.1"/\' {proof}')
    again = "apt-get -qq -y install --reinstall docker.io"
    bench.run(f"DEBIAN_FRONTEND=noninteractive {again} 2>&1 && systemctl restart docker",
              timeout_s=180)  # fmt: skip

    bench.guest.wait(f"test $(systemctl show -p InvocationID --value {UNIT}) != {before}")
    bench.guest.wait(f"systemctl is-active {UNIT}", seconds=90)
    bench.serves(A)
    told = bench.told(A)
    assert told["proof"]["level"] == "quick"
    assert f"docker 20.10.1 -> {version}" in told["unproven"]
    # The next deploy asks for this change; what runs is proven, not started again.
    run = run_of(bench)
    assert bench.switch(A)["state"] == "switched"
    assert run_of(bench) == run
    told = bench.told(A)
    assert (told["unproven"], told["proof"]["level"]) == (None, "full")
    assert told["proof"]["last_full"]["versions"]["docker"] == version


def test_a_foreign_prune_takes_nothing_of_a_running_server(bench: Bench) -> None:
    bench.good(A)
    bench.run("docker system prune -af --volumes >/dev/null")
    bench.serves(A)
    bench.run(f"systemctl restart {UNIT}")
    bench.serves(A)
