import os
import signal
import subprocess
import threading
import time

import pytest
from spark_host.engine import container
from spark_host.engine.memory import GIB
from spark_host.system import docker, systemd
from spark_host.system.host import read_events
from spark_host.watch import start_guard, watchdog
from stub_host import check_at_start, stored_proof, wait_until

FLOOR_BYTES = 4 * GIB


@pytest.fixture
def meminfo(tmp_path, monkeypatch):
    path = tmp_path / "meminfo"
    monkeypatch.setenv("SPARK_MEMINFO", str(path))
    set_available(path, 60)
    return path


@pytest.fixture(autouse=True)
def systemctl_calls(host, monkeypatch):
    calls: list[tuple[str, ...]] = []

    def systemctl(*words, timeout_s=60):
        calls.append(words)
        host.engines[-1].kill()
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(systemd, "systemctl", systemctl)
    monkeypatch.setattr(watchdog, "_UNIT_STOP_TIMEOUT_S", 0.5)
    return calls


@pytest.fixture
def pidfd(host, monkeypatch):
    monkeypatch.setattr(container, "open_process", lambda _: os.pidfd_open(host.engines[-1].pid))


def set_available(meminfo, gib):
    temporary = meminfo.with_suffix(".new")
    temporary.write_text(f"MemTotal: {119 << 20} kB\nMemAvailable: {int(gib * (1 << 20))} kB\n")
    temporary.rename(meminfo)


def lower_later(meminfo, gib, seconds=0.6):
    threading.Timer(seconds, set_available, (meminfo, gib)).start()


def start(host, load_s="60"):
    memory = {"needed_bytes": 1, "wait_s": 1, "floor_bytes": FLOOR_BYTES}
    release = host.release(memory=memory, timeouts__start_s=30)
    host.start(release, STUB_LOAD_S=load_s)
    return release


@pytest.mark.usefixtures("pidfd")
def test_loading_engine_is_killed_if_free_memory_falls_below_the_floor(host, meminfo):
    release = start(host)
    lower_later(meminfo, 3.25)
    began = time.monotonic()

    result = check_at_start(host, release)

    assert time.monotonic() - began < 25
    assert host.engines[-1].wait(2) == -9
    finding = result.failed[0]
    assert (result.ok, finding.name) == (False, "memory")
    assert finding.detail.startswith(
        "3.25 GiB of memory is available, but the floor is 4.00 GiB; "
        "the engine was killed during startup; fix: lower engine.memory_fraction"
    )
    memory = stored_proof(host, release).start_memory
    assert memory.lowest_bytes == int(3.25 * GIB)
    assert read_events("main", host.paths)[0].kind == "starving"


@pytest.mark.usefixtures("pidfd", "meminfo")
def test_single_low_memory_sample_is_only_recorded(host, monkeypatch):
    samples = iter([50, 3, 40])
    monkeypatch.setattr(start_guard, "available_bytes", lambda: next(samples, 45) * GIB)

    result = check_at_start(host, start(host, load_s="1.5"))

    assert result.ok, result.failed
    [finding] = [finding for finding in result.checks if finding.name == "memory"]
    assert finding.detail.startswith("available memory stayed at or above 3.0 GiB")
    memory = result.start_memory
    assert (memory.lowest_bytes, memory.floor_bytes) == (3 * GIB, FLOOR_BYTES)


def test_very_short_check_still_samples_memory(host, monkeypatch):
    def read_slowly():
        time.sleep(0.3)
        return 50 * GIB

    monkeypatch.setattr(start_guard, "available_bytes", read_slowly)
    with start_guard.StartGuard(start(host, load_s="0"), host.paths) as guard:
        memory = guard.start_memory
    assert memory.lowest_bytes == 50 * GIB


@pytest.mark.usefixtures("pidfd")
def test_memory_is_guarded_until_the_check_ends(host, meminfo, monkeypatch):
    kill_container = container.kill_container

    def kill_slowly(*arguments):
        try:
            return kill_container(*arguments)
        finally:
            time.sleep(1)  # the check ends before the killer continues

    monkeypatch.setattr(container, "kill_container", kill_slowly)
    release = start(host, load_s="0")
    (host.paths.engine_run("main") / "stub-fault").write_text("wedge")
    lower_later(meminfo, 1)

    assert check_at_start(host, release).failed[0].name == "memory"
    assert host.engines[-1].wait(2) == -9


@pytest.mark.parametrize("obstacle", ["slow docker", "no permission"])
def test_docker_kills_an_engine_that_the_guard_cannot(host, meminfo, monkeypatch, obstacle):
    kills: list[tuple[str, ...]] = []
    over = threading.Event()

    def open_process(_):
        if obstacle == "slow docker":
            over.wait(30)
            return None
        return os.pidfd_open(host.engines[-1].pid)

    def send_signal(*_):
        raise PermissionError(1, "Operation not permitted")

    def client(*words, timeout_s):
        kills.append(words)
        host.engines[-1].kill()
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(container, "open_process", open_process)
    monkeypatch.setattr(signal, "pidfd_send_signal", send_signal)
    monkeypatch.setattr(docker, "client", client)
    release = start(host)
    lower_later(meminfo, 1, 0.5)
    began = time.monotonic()

    result = check_at_start(host, release)

    over.set()
    assert time.monotonic() - began < 20
    assert result.failed[0].name == "memory"
    assert kills == [("kill", release.container)]


def test_unit_is_killed_if_it_outlives_its_engine(host, meminfo, systemctl_calls, monkeypatch):
    failure = subprocess.CompletedProcess((), 1, "", "it hangs")
    monkeypatch.setattr(container, "open_process", lambda _: None)
    monkeypatch.setattr(docker, "client", lambda *_, timeout_s: failure)
    release = start(host)
    set_available(meminfo, 1)

    assert check_at_start(host, release).failed[0].name == "memory"
    wait_until(lambda: systemctl_calls, "the unit is killed")
    assert systemctl_calls == [("kill", "--signal=KILL", release.serve_unit)]
