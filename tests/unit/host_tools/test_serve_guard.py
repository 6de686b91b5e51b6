"""The start guard kills an engine before the host runs out of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from spark_contract.records import Proof
from spark_contract.release import Release
from spark_host.check import runner
from spark_host.engine import container
from spark_host.engine.memory import GIB
from spark_host.records import proof
from spark_host.system import docker, systemd
from spark_host.watch import start_guard, watchdog
from stub_host import Host, wait_until

FLOOR = 4 * GIB


@pytest.fixture
def meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "meminfo"
    monkeypatch.setenv("SPARK_MEMINFO", str(path))
    leave(path, 60)
    return path


@pytest.fixture(autouse=True)
def asked(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    words: list[tuple[str, ...]] = []

    def systemctl(*said: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        words.append(said)
        host.engines[-1].kill()
        return subprocess.CompletedProcess(said, 0, "", "")

    monkeypatch.setattr(systemd, "systemctl", systemctl)
    monkeypatch.setattr(watchdog, "_UNIT_ENDS_S", 0.5)
    return words


def leave(meminfo: Path, gib: float) -> None:
    aside = meminfo.with_suffix(".new")
    aside.write_text(f"MemTotal: {119 << 20} kB\nMemAvailable: {int(gib * (1 << 20))} kB\n")
    aside.rename(meminfo)


@pytest.fixture
def held(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "open_process", lambda _: os.pidfd_open(host.engines[-1].pid))


def loading(host: Host, load_s: str = "60") -> Release:
    release = host.release(
        memory={"needed_bytes": 1, "wait_s": 1, "floor_bytes": FLOOR}, timeouts__start_s=30
    )
    host.start(release, STUB_LOAD_S=load_s)
    return release


def check_at_start(host: Host, release: Release) -> Proof:
    return runner.check(release, host.here, "quick", print, "run-1", at_start=True)


def later(seconds: float, meminfo: Path, gib: float) -> threading.Timer:
    timer = threading.Timer(seconds, leave, (meminfo, gib))
    timer.start()
    return timer


def test_engine_below_the_floor_is_killed_while_it_loads(
    host: Host, meminfo: Path, held: None
) -> None:
    release = loading(host)
    later(0.6, meminfo, 3.25)
    begun = time.monotonic()

    result = check_at_start(host, release)

    assert time.monotonic() - begun < 5
    assert host.engines[-1].wait(2) == -9
    found = result.failed[0]
    assert (result.ok, found.name) == (False, "memory")
    assert found.detail.startswith(
        "3.25 GiB of memory are available, the floor is 4.00 GiB (memory.floor_gib): "
        "the engine was stopped while it started; fix: lower engine.memory_fraction"
    )
    kept = proof.read(release.name, host.here)
    assert kept is not None
    assert kept.start_memory is not None
    assert kept.start_memory.lowest_bytes == int(3.25 * GIB)
    event = watchdog.events("main", host.paths)[0]
    assert (event.kind, "while it started" in event.text) == ("starving", True)


def test_single_low_sample_is_only_recorded(
    host: Host, meminfo: Path, held: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([50, 3, 40])
    monkeypatch.setattr(start_guard, "available_bytes", lambda: next(looks, 45) * GIB)

    result = check_at_start(host, loading(host, load_s="1.5"))

    assert result.ok, result.failed
    [found] = [one for one in result.checks if one.name == "memory"]
    assert found.detail.startswith("3.0 GiB or more were available while it started")
    assert result.start_memory is not None
    assert (result.start_memory.lowest_bytes, result.start_memory.floor_bytes) == (3 * GIB, FLOOR)


def test_very_short_check_has_a_memory_sample(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly() -> int:
        time.sleep(0.3)
        return 50 * GIB

    monkeypatch.setattr(start_guard, "available_bytes", slowly)
    with start_guard.StartGuard(loading(host, load_s="0"), host.paths) as guarded:
        seen = guarded.start_memory
    assert seen is not None
    assert seen.lowest_bytes == 50 * GIB


def test_memory_is_guarded_until_the_check_ends(host: Host, meminfo: Path, held: None) -> None:
    release = loading(host, load_s="0")
    # A slow answer, while memory runs out.
    (host.paths.engine_run("main") / "stub-fault").write_text("wedge")
    later(0.6, meminfo, 1)

    result = check_at_start(host, release)

    assert result.failed[0].name == "memory"
    assert host.engines[-1].wait(2) == -9


def test_without_pidfd_docker_kills_the_engine(
    host: Host, meminfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[str, ...]] = []
    over = threading.Event()

    def hangs(_: str) -> None:
        over.wait(3)

    def client(*words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        killed.append(words)
        host.engines[-1].kill()
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(container, "open_process", hangs)
    monkeypatch.setattr(docker, "client", client)
    release = loading(host)
    later(0.5, meminfo, 1)
    begun = time.monotonic()

    result = check_at_start(host, release)

    over.set()
    assert time.monotonic() - begun < 2.5
    assert result.failed[0].name == "memory"
    assert killed == [("kill", release.container)]


def test_unkillable_process_is_killed_by_docker(
    host: Host, meminfo: Path, held: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def client(*words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        host.engines[-1].kill()
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(signal, "pidfd_send_signal", refused)
    monkeypatch.setattr(docker, "client", client)
    release = loading(host)
    leave(meminfo, 1)

    assert check_at_start(host, release).failed[0].name == "memory"


def test_unit_that_survives_its_engine_is_killed(
    host: Host, meminfo: Path, asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "open_process", lambda _: None)
    monkeypatch.setattr(
        docker, "client", lambda *_, timeout_s: subprocess.CompletedProcess((), 1, "", "it hangs")
    )
    release = loading(host)
    leave(meminfo, 1)

    assert check_at_start(host, release).failed[0].name == "memory"
    wait_until(lambda: asked, "systemd was asked")
    assert asked == [("kill", "--signal=KILL", release.serve_unit)]


def test_full_check_keeps_the_memory_of_the_start(host: Host, meminfo: Path, held: None) -> None:
    release = loading(host, load_s="0.4")
    leave(meminfo, 17)
    assert check_at_start(host, release).ok
    leave(meminfo, 60)

    runner.check(release, host.here, "full", print, "run-1")
    kept = proof.read(release.name, host.here)
    assert kept is not None
    assert kept.level == "full"
    assert kept.start_memory is not None
    assert kept.start_memory.lowest_bytes == 17 * GIB
    # Not of another run.
    runner.check(release, host.here, "full", print, "run-2")
    kept = proof.read(release.name, host.here)
    assert kept is not None
    assert kept.start_memory is None
