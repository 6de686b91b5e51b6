"""Free memory without contiguous blocks: a start defragments it, serves, or names a reboot.

What /proc/buddyinfo shows is constructed from reports (lab/buddyinfo); what the kernel would do
is written into files of the guest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.memory import BUDDYINFO, PROC
from tests.faults.bench import A, Bench

VM = f"/{PROC}/sys/vm"
DROP_IN = f"/etc/systemd/system/spark-serve@{A}.service.d/60-bench.conf"
# Compaction that helps: the first write brings the blocks of a healthy host.
HELPS = f"""[Path]
PathModified={VM}/compact_memory
[Install]
WantedBy=multi-user.target"""
JOURNALCTL = """#!/bin/sh
case "$1" in -k) cat /run/bench/kernel-log;; *) exec /usr/bin/journalctl "$@";; esac"""
NO_MEMORY = (
    "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) "
    "returned from _memdescAllocInternal(pMemDesc) @ mem_desc.c:1359"
)


def show(bench: Bench, name: str) -> None:
    bench.write(f"/{PROC}/buddyinfo", (BUDDYINFO / f"{name}.txt").read_text().rstrip())


def written(bench: Bench) -> list[str]:
    return [bench.run(f"cat {VM}/{name}").strip() for name in ("drop_caches", "compact_memory")]


@pytest.fixture(autouse=True)
def healthy(bench: Bench) -> Iterator[None]:
    bench.wipe()
    show(bench, "healthy")
    bench.run(f": > {VM}/drop_caches; : > {VM}/compact_memory")
    yield
    show(bench, "healthy")


@contextmanager
def helpful_compaction(bench: Bench) -> Iterator[None]:
    bench.write("/run/healthy", (BUDDYINFO / "healthy.txt").read_text().rstrip())
    bench.write("/run/systemd/system/compaction.path", HELPS)
    bench.write(
        "/run/systemd/system/compaction.service",
        f"[Service]\nType=oneshot\nExecStart=/bin/sh -c 'cat /run/healthy > /{PROC}/buddyinfo'",
    )
    bench.run("systemctl daemon-reload; systemctl start compaction.path")
    try:
        yield
    finally:
        bench.run("systemctl stop compaction.path; rm /run/systemd/system/compaction.*")


@contextmanager
def kernel_log(bench: Bench, text: str) -> Iterator[None]:
    bench.write("/run/bench/kernel-log", text)
    bench.write("/usr/local/bin/journalctl", JOURNALCTL)
    bench.run("chmod 755 /usr/local/bin/journalctl")
    try:
        yield
    finally:
        bench.run("rm -r /usr/local/bin/journalctl /run/bench")


def test_a_healthy_host_keeps_its_caches(bench: Bench) -> None:
    bench.good(A)
    assert written(bench) == ["", ""]
    bench.serves(A)


def test_a_start_compacts_and_serves(bench: Bench) -> None:
    with helpful_compaction(bench), kernel_log(bench, NO_MEMORY):
        show(bench, "fragmented")
        bench.good(A)
    assert written(bench) == ["3", "1"]
    bench.serves(A)


def test_blocks_are_freed_while_the_engine_loads(bench: Bench) -> None:
    bench.release(A, engine__env={"STUB_LOAD_S": "6"})
    bench.begin(A)
    bench.guest.wait("docker ps -q --filter name=spark- | grep .")
    assert written(bench) == ["", ""]
    show(bench, "low")
    assert bench.ended(A)["state"] == "switched"
    assert written(bench) == ["3", "1"]


def test_a_driver_that_finds_no_blocks_fails_the_proof_and_names_the_reboot(bench: Bench) -> None:
    with kernel_log(bench, NO_MEMORY):
        show(bench, "fragmented")
        bench.release(A)
        result = bench.switch(A)
    assert result["state"] != "switched"
    assert written(bench) == ["3", "1"]
    assert "NV_ERR_NO_MEMORY" in result["reason"]
    assert "reboot the host" in result["reason"]


def test_the_unit_may_write_these_two_tunables_and_no_other(bench: Bench) -> None:
    bench.release(A)
    bench.write(
        DROP_IN,
        "[Service]\nExecStartPre=/bin/sh -c 'for name in drop_caches compact_memory swappiness; "
        "do test -w /proc/sys/vm/$$name && echo $$name; done > /run/writable; :'",
    )
    bench.run("systemctl daemon-reload")
    assert bench.switch(A)["state"] == "switched"
    assert bench.run("cat /run/writable").split() == ["drop_caches", "compact_memory"]
