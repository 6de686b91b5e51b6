"""Free memory without contiguous blocks: a start compacts it and serves, or names a reboot.

The guest has its own /proc/buddyinfo, from reports (lab/buddyinfo), and its own kernel tunables.
"""

from contextlib import contextmanager

import pytest

from lab.memory import BUDDYINFO, PROC
from tests.faults.bench import A

VM = f"/{PROC}/sys/vm"
DROP_IN = f"/etc/systemd/system/spark-serve@{A}.service.d/60-bench.conf"
# Effective compaction: the first write restores the free blocks of a healthy host.
COMPACTION_UNIT = f"""[Path]
PathModified={VM}/compact_memory
[Install]
WantedBy=multi-user.target"""
JOURNALCTL = """#!/bin/sh
case "$1" in -k) cat /run/bench/kernel-log;; *) exec /usr/bin/journalctl "$@";; esac"""
NO_MEMORY = (
    "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) "
    "returned from _memdescAllocInternal(pMemDesc) @ mem_desc.c:1359"
)


def set_buddyinfo(bench, name):
    bench.write(f"/{PROC}/buddyinfo", (BUDDYINFO / f"{name}.txt").read_text().rstrip())


def compaction_requests(bench):
    return [bench.run(f"cat {VM}/{name}").strip() for name in ("drop_caches", "compact_memory")]


@pytest.fixture(autouse=True)
def healthy(bench):
    bench.wipe()
    set_buddyinfo(bench, "healthy")
    bench.run(f": > {VM}/drop_caches; : > {VM}/compact_memory")
    yield
    set_buddyinfo(bench, "healthy")


@contextmanager
def effective_compaction(bench):
    bench.write("/run/healthy", (BUDDYINFO / "healthy.txt").read_text().rstrip())
    bench.write("/run/systemd/system/compaction.path", COMPACTION_UNIT)
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
def kernel_log(bench, text):
    bench.write("/run/bench/kernel-log", text)
    bench.write("/usr/local/bin/journalctl", JOURNALCTL)
    bench.run("chmod 755 /usr/local/bin/journalctl")
    try:
        yield
    finally:
        bench.run("rm -r /usr/local/bin/journalctl /run/bench")


def test_engine_start_without_fragmented_memory_keeps_page_cache(bench):
    bench.serve_proven(A)
    assert compaction_requests(bench) == ["", ""]


def test_engine_start_compacts_fragmented_memory_and_serves(bench):
    with effective_compaction(bench), kernel_log(bench, NO_MEMORY):
        set_buddyinfo(bench, "fragmented")
        bench.serve_proven(A)
    assert compaction_requests(bench) == ["3", "1"]


def test_memory_is_compacted_if_large_blocks_run_out_during_loading(bench):
    bench.release(A, engine__env={"STUB_LOAD_S": "6"})
    bench.start_switch(A)
    bench.guest.wait("docker ps -q --filter name=spark- | grep .")
    assert compaction_requests(bench) == ["", ""]
    set_buddyinfo(bench, "low")
    assert bench.wait_for_result(A)["state"] == "switched"
    assert compaction_requests(bench) == ["3", "1"]


def test_start_suggests_a_reboot_if_the_driver_cannot_allocate_large_blocks(bench):
    with kernel_log(bench, NO_MEMORY):
        set_buddyinfo(bench, "fragmented")
        bench.release(A)
        result = bench.switch(A)
    assert result["state"] != "switched"
    assert compaction_requests(bench) == ["3", "1"]
    assert "NV_ERR_NO_MEMORY" in result["reason"]
    assert "reboot" in result["reason"]


def test_compaction_unit_can_write_only_two_kernel_tunables(bench):
    bench.release(A)
    bench.write(
        DROP_IN,
        "[Service]\nExecStartPre=/bin/sh -c 'for name in drop_caches compact_memory swappiness; "
        "do test -w /proc/sys/vm/$$name && echo $$name; done > /run/writable; :'",
    )
    bench.run("systemctl daemon-reload")
    assert bench.switch(A)["state"] == "switched"
    assert bench.run("cat /run/writable").split() == ["drop_caches", "compact_memory"]
