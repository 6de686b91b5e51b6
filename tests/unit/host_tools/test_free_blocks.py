import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from spark_contract.machine import GIB, FreeBlocks, parse_buddyinfo
from spark_host.engine import compile_cache, logs, memory
from spark_host.system.host import read_events
from spark_host.watch import sensors, start_guard, watchdog
from stub_host import check_at_start

from lab.memory import BUDDYINFO, PROC

CAPTURES = Path(__file__).parents[2] / "fixtures/captures"
NEEDED = {"needed_bytes": 90 * GIB, "wait_s": 1, "floor_bytes": 1}
SAMPLES = {path.stem: path.read_text() for path in BUDDYINFO.glob("*.txt")}


def set_buddyinfo(host, name):
    (host.paths.root / PROC / "buddyinfo").write_text(SAMPLES[name])


def written(host):
    vm = host.paths.root / PROC / "sys/vm"
    return [(vm / name).read_text().strip() for name in ("drop_caches", "compact_memory")]


@pytest.mark.parametrize(
    ("name", "needed_gib", "low", "fragmented"),
    [
        ("healthy", 90, False, False),
        ("fragmented", 90, False, True),
        ("low", 90, True, False),
        ("low", 0.05, False, False),
    ],
)
def test_distinguishes_low_memory_from_fragmented_memory(name, needed_gib, low, fragmented):
    blocks = parse_buddyinfo(SAMPLES[name], 4096)
    assert blocks.is_low(int(needed_gib * GIB)) == low
    assert blocks.is_fragmented == fragmented


@pytest.mark.parametrize(
    ("page_bytes", "counts", "min_block_bytes", "free_bytes"),
    [
        (4096, "1 0 0 0 1 0 0 0 0 0 2", 64 << 10, (64 << 10) + (8 << 20)),
        (65536, "3 0 1", 64 << 10, (3 * 64 << 10) + (256 << 10)),
        (4096, "9 0 0 0 0 0 0 0 0 0 2", 32 << 20, 8 << 20),
    ],
)
def test_parses_free_memory_blocks_by_size(page_bytes, counts, min_block_bytes, free_bytes):
    blocks = parse_buddyinfo(f"Node 0, zone   Normal {counts} \n", page_bytes)
    assert blocks.free_bytes(min_block_bytes) == free_bytes
    assert parse_buddyinfo("", page_bytes) is None


@pytest.mark.parametrize(
    ("name", "expected"), [("healthy", ["", ""]), ("low", ["3", "1"]), ("fragmented", ["3", "1"])]
)
def test_start_defragments_only_if_large_blocks_are_missing(host, name, expected):
    set_buddyinfo(host, name)
    memory.prepare_blocks(host.release(memory=NEEDED), print)
    assert written(host) == expected


def test_start_continues_if_the_kernel_rejects_compaction(host):
    set_buddyinfo(host, "fragmented")
    shutil.rmtree(host.paths.root / PROC / "sys")
    lines: list[str] = []
    memory.prepare_blocks(host.release(memory=NEEDED), lines.append)
    assert "drop_caches" in lines[-1]


def release_with_driver_failures(host, monkeypatch, count, **changes):
    monkeypatch.setattr(start_guard, "_BLOCKS_INTERVAL_S", 0.05)
    log = (CAPTURES / "journalctl--nvrm-no-memory--01.txt").read_text() * count
    monkeypatch.setattr(logs.programs, "read_output_start", lambda *_: log)
    return host.release(memory=NEEDED, **changes)


@pytest.mark.parametrize(("name", "expected"), [("healthy", ["", ""]), ("low", ["3", "1"])])
def test_large_blocks_are_kept_free_while_the_engine_loads(host, monkeypatch, name, expected):
    release = release_with_driver_failures(host, monkeypatch, 0)
    set_buddyinfo(host, name)
    host.start(release, STUB_LOAD_S="0.5")
    assert check_at_start(host, release).ok
    assert written(host) == expected


@pytest.mark.parametrize("helps", [True, False])
def test_unsuccessful_defragmentation_is_repeated_less_often(host, monkeypatch, helps):
    calls: list[str] = []

    def read_free_blocks():
        name = "healthy" if helps and calls[-1:] == ["defragment"] else "low"
        calls.append("read")
        return parse_buddyinfo(SAMPLES[name], 4096)

    release = release_with_driver_failures(host, monkeypatch, 0)
    monkeypatch.setattr(start_guard, "_BLOCKS_INTERVAL_S", 0.02)
    monkeypatch.setattr(start_guard, "_DEFRAGMENT_REST_S", 0.02)
    monkeypatch.setattr(start_guard, "read_free_blocks", read_free_blocks)
    monkeypatch.setattr(start_guard, "defragment", lambda: calls.append("defragment") or "")
    with start_guard.StartGuard(release, host.paths):
        time.sleep(1.2)
    rounds = calls.count("defragment")
    assert rounds > 10 if helps else 1 < rounds <= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failures", "loads", "fails"),
    [
        ("healthy", 0, True, False),
        ("healthy", 3, True, False),
        ("fragmented", 0, True, False),
        ("fragmented", 3, True, True),
        ("healthy", 3, False, True),
        ("fragmented", 0, False, True),
        ("healthy", 0, False, False),
    ],
)
def test_driver_allocation_failures_fail_a_start(host, monkeypatch, name, failures, loads, fails):
    start_s = 20 if loads else 0.5
    release = release_with_driver_failures(host, monkeypatch, failures, timeouts__start_s=start_s)
    set_buddyinfo(host, name)
    host.start(release, STUB_LOAD_S="0" if loads else "60")

    result = check_at_start(host, release)

    assert result.ok == (loads and not fails)
    [finding] = [finding for finding in result.checks if finding.name == "memory"]
    assert finding.ok != fails
    assert ("reboot the host" in finding.detail) == fails
    assert ("NV_ERR_NO_MEMORY" in finding.detail) == bool(failures)


@contextmanager
def watching_sensors(release, host, monkeypatch):
    monkeypatch.setattr(watchdog, "_SENSORS_INTERVAL_S", 0.0)
    monkeypatch.setattr(watchdog, "_update_gateway", lambda *_: None)
    monkeypatch.setattr(sensors, "read", lambda: None)
    stop = threading.Event()
    thread = threading.Thread(target=watchdog._watch_sensors, args=(release, host.paths, stop))
    thread.start()
    yield
    stop.set()
    thread.join()


def test_watchdog_reports_fragmented_memory_once(host, monkeypatch):
    with watching_sensors(host.release(watch__interval_s=0.01), host, monkeypatch):
        time.sleep(0.1)
        assert read_events("main", host.paths) == ()
        set_buddyinfo(host, "fragmented")
        time.sleep(0.3)
    assert [event.kind for event in read_events("main", host.paths)] == ["fragmented"]


@pytest.mark.parametrize(("limit", "size_bytes"), [("LIMIT_FILES", 0), ("LIMIT_BYTES", 40_000)])
def test_watchdog_stops_an_engine_that_fills_the_disk(host, monkeypatch, limit, size_bytes):
    assert compile_cache.LIMIT_BYTES == 20 << 30
    monkeypatch.setattr(compile_cache, limit, 2 + 2 * size_bytes)
    mount = {"source": "/srv/cache/x", "target": "/cache", "read_only": False}
    release, killed = host.release(engine__mounts=[mount]), threading.Event()
    monkeypatch.setattr(watchdog, "kill_engine", lambda *_: killed.set())
    cache = host.paths.below(str(release.cache))
    cache.mkdir(parents=True)
    with watching_sensors(release, host, monkeypatch):
        assert not killed.wait(0.5)
        for number in range(3):
            (cache / str(number)).write_bytes(bytes(size_bytes))
        assert killed.wait(10)


# Memory is fragmented below 8 GiB in large blocks, and has recovered at 16 GiB.
@pytest.mark.parametrize(
    ("samples", "events"),
    [
        ([(0, 7), (20, 9), (40, 7), (60, 9), (80, 7)], 1),
        ([(0, 7), (20, 17), (40, 7)], 2),
        ([(0, 7), (300, 9), (620, 7)], 2),
        ([(at_s, 7) for at_s in range(0, 2000, 20)], 1),
    ],
)
def test_fragmentation_near_the_limit_is_reported_once(samples, events):
    fragmentation = watchdog.Fragmentation()
    begins = [
        fragmentation.is_new(FreeBlocks(((4 << 10, 20 * GIB), (32 << 20, int(gib * GIB)))), at_s)
        for at_s, gib in samples
    ]
    assert begins.count(True) == events
