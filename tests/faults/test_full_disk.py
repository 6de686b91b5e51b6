"""A disk without a free byte under what the host tools write: a server goes on, or comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.bench import A, B, Bench

STATE = "/var/lib/spark"
FULL = "No space left on device"


class Disk:
    """A small file system of its own below the state directory of the bench."""

    def __init__(self, bench: Bench):
        self.bench = bench

    def fill(self) -> None:
        """Leave no byte free: in blocks first, then byte by byte what is left."""
        self.bench.run(
            f"dd if=/dev/zero of={STATE}/filler bs=4k 2>/dev/null; "
            f"! sh -c 'echo x > {STATE}/more' 2>/dev/null"
        )

    def free(self) -> None:
        self.bench.run(f"rm -f {STATE}/filler {STATE}/more")


@pytest.fixture
def disk(bench: Bench) -> Iterator[Disk]:
    bench.wipe()
    bench.run(
        f"mkdir -p {STATE} && cp -a {STATE} /run/kept && "
        f"mount -t tmpfs -o size=2m tmpfs {STATE} && cp -a /run/kept/. {STATE}/"
    )
    yield Disk(bench)
    bench.wipe()
    bench.run(f"umount -l {STATE}; rm -rf /run/kept")


def test_a_change_on_a_full_disk_is_not_begun_and_the_file_is_named(
    bench: Bench, disk: Disk
) -> None:
    bench.good(A)
    run = bench.guest.run(f"systemctl show -p InvocationID --value spark-serve@{A}")
    bench.release(B)
    disk.fill()

    bench.begin(B)
    bench.guest.wait(f"systemctl is-failed spark-switch@{B}", seconds=60)

    said = bench.run(f"journalctl -u spark-switch@{B} -o cat -n 30")
    assert FULL in said
    assert f"{STATE}/switch/" in said
    assert bench.guest.serving() == [f"spark-serve@{A}.service"]
    assert bench.guest.boots() == [f"spark-serve@{A}.service"]
    # The same run as before: it was not even drained.
    assert bench.guest.run(f"systemctl show -p InvocationID --value spark-serve@{A}") == run
    assert bench.answers()
    disk.free()
    assert bench.switch(B)["state"] == "switched"
    bench.serves(B)


def test_a_disk_that_fills_up_during_a_change_brings_the_old_release_back(
    bench: Bench, disk: Disk
) -> None:
    bench.good(A)
    bench.release(B, engine__env={"STUB_LOAD_S": "6"})
    bench.begin(B)
    bench.at_phase(B, "start")
    disk.fill()

    bench.guest.wait(
        f"! systemctl is-active spark-switch@{B} && systemctl is-active spark-serve@{A}", seconds=90
    )

    assert FULL in bench.run(f"journalctl -u spark-switch@{B} -o cat -n 60")
    assert bench.guest.serving() == [f"spark-serve@{A}.service"]
    assert bench.guest.boots() == [f"spark-serve@{A}.service"]
    assert bench.answers()
    # What was proven before is still whole, and is what a boot goes by.
    assert bench.guest.json(f"cat {STATE}/good/main.json")["release"] == A
    disk.free()
    assert bench.switch(B)["state"] == "switched"
    bench.serves(B)


def test_a_server_that_answers_right_starts_though_its_proof_cannot_be_kept(
    bench: Bench, disk: Disk
) -> None:
    bench.good(A)
    disk.fill()

    bench.run(f"systemctl restart spark-serve@{A}", timeout_s=90)
    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)

    assert "the proof was not written" in bench.run(f"journalctl -u spark-serve@{A} -o cat -n 60")
    assert bench.answers()
    assert bench.guest.json(f"cat {STATE}/good/main.json")["release"] == A
    disk.free()
    assert bench.switch(A)["state"] == "switched"
    bench.serves(A)
