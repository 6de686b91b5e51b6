"""A server starts again although the disk of the state directory is full.

test_sweep_resources.py fills the disk before and during rollouts.
"""

import pytest

from tests.faults.bench import A

STATE = "/var/lib/spark"
FILL = (
    f"dd if=/dev/zero of={STATE}/filler bs=4k 2>/dev/null; "
    f"! sh -c 'echo x > {STATE}/more' 2>/dev/null"
)


@pytest.fixture
def small_disk(bench):
    bench.wipe()
    bench.run(
        f"mkdir -p {STATE} && cp -a {STATE} /run/kept && "
        f"mount -t tmpfs -o size=2m tmpfs {STATE} && cp -a /run/kept/. {STATE}/"
    )
    yield
    bench.wipe()
    bench.run(f"umount -l {STATE}; rm -rf /run/kept")


@pytest.mark.usefixtures("small_disk")
def test_server_starts_on_a_full_disk_without_saving_the_check_result(bench):
    bench.serve_proven(A)
    bench.run(FILL)

    bench.run(f"systemctl restart spark-serve@{A}", timeout_s=90)
    bench.guest.wait(f"systemctl is-active spark-serve@{A}", seconds=60)

    log = bench.run(f"journalctl -u spark-serve@{A} -o cat -n 60")
    assert "No space left on device" in log
    assert bench.answers()
    assert bench.guest.json(f"cat {STATE}/good/main.json")["release"] == A
    bench.run(f"rm -f {STATE}/filler {STATE}/more")
    bench.assert_switches(A)
