"""A full disk below the state directory: a server keeps running, or starts again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.bench import A, B, Bench

STATE = "/var/lib/spark"
FULL = "No space left on device"
# Leaves no byte free: whole blocks first, then single bytes.
FILL = (
    f"dd if=/dev/zero of={STATE}/filler bs=4k 2>/dev/null; "
    f"! sh -c 'echo x > {STATE}/more' 2>/dev/null"
)
FREE = f"rm -f {STATE}/filler {STATE}/more"


@pytest.fixture(autouse=True)
def small_disk(bench: Bench) -> Iterator[None]:
    bench.wipe()
    bench.run(
        f"mkdir -p {STATE} && cp -a {STATE} /run/kept && "
        f"mount -t tmpfs -o size=2m tmpfs {STATE} && cp -a /run/kept/. {STATE}/"
    )
    yield
    bench.wipe()
    bench.run(f"umount -l {STATE}; rm -rf /run/kept")


def assert_still_serves(bench: Bench) -> None:
    """Check the server, the boot list and the state file of the boot."""
    assert bench.guest.serving() == bench.guest.boots() == [f"spark-serve@{A}.service"]
    assert bench.answers()
    assert bench.guest.json(f"cat {STATE}/good/main.json")["release"] == A


def test_rollout_on_full_disk_is_refused_naming_the_file(bench: Bench) -> None:
    bench.serve_proven(A)
    before = bench.guest.invocation(A)
    bench.release(B)
    bench.run(FILL)

    bench.start_switch(B)
    bench.guest.wait(f"systemctl is-failed spark-switch@{B}", seconds=60)

    log = bench.run(f"journalctl -u spark-switch@{B} -o cat -n 30")
    assert FULL in log
    assert f"{STATE}/switch/" in log
    assert bench.guest.invocation(A) == before
    assert_still_serves(bench)
    bench.run(FREE)
    bench.assert_switches(B)


def test_disk_filling_during_rollout_restores_old_release(bench: Bench) -> None:
    bench.serve_proven(A)
    bench.release(B, engine__env={"STUB_LOAD_S": "6"})
    bench.start_switch(B)
    bench.wait_for_phase(B, "start")
    bench.run(FILL)

    bench.guest.wait(
        f"! systemctl is-active spark-switch@{B} && systemctl is-active spark-serve@{A}", seconds=90
    )

    assert FULL in bench.run(f"journalctl -u spark-switch@{B} -o cat -n 60")
    assert_still_serves(bench)
    bench.run(FREE)
    bench.assert_switches(B)


def test_working_server_starts_although_proof_cannot_be_written(bench: Bench) -> None:
    bench.serve_proven(A)
    bench.run(FILL)

    bench.run(f"systemctl restart spark-serve@{A}", timeout_s=90)
    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)

    assert FULL in bench.run(f"journalctl -u spark-serve@{A} -o cat -n 60")
    assert_still_serves(bench)
    bench.run(FREE)
    bench.assert_switches(A)
