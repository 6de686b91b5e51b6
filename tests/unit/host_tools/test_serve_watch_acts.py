"""The watchdog kills an engine even if docker, disk and driver hang."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spark_contract import files
from spark_host.engine import container
from spark_host.engine.client import Engine, EngineError
from spark_host.gateway import gateway
from spark_host.system import docker, systemd
from spark_host.watch import sensors, watchdog
from stub_host import RELEASE, Host

UNIT = f"spark-serve@{RELEASE}.service"


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    words: list[tuple[str, ...]] = []

    def systemctl(*said: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        words.append(said)
        return subprocess.CompletedProcess(said, 0, "", "")

    monkeypatch.setattr(systemd, "systemctl", systemctl)
    monkeypatch.setattr(watchdog, "_UNIT_ENDS_S", 0.0)
    return words


def kinds(host: Host) -> list[str]:
    return [event.kind for event in watchdog.events("main", host.paths)]


def test_engine_with_pidfd_is_killed_without_docker(
    host: Host, engine: subprocess.Popen[bytes], asked: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delattr(docker, "client")
    watchdog.kill_engine(
        host.release(), "starving", "too little", os.pidfd_open(engine.pid), host.paths
    )
    assert engine.wait(5) == -9
    assert watchdog.events("main", host.paths)[0].text == "too little; the engine is stopped"


def test_unit_that_outlives_its_engine_is_killed(
    host: Host, engine: subprocess.Popen[bytes], asked: list[tuple[str, ...]]
) -> None:
    watchdog.kill_engine(
        host.release(), "starving", "too little", os.pidfd_open(engine.pid), host.paths
    )
    assert asked == [("kill", "--signal=KILL", UNIT)]
    assert kinds(host) == ["starving", "kill"]


def test_killing_an_exited_engine_is_no_error() -> None:
    child = subprocess.Popen(["true"])
    handle = os.pidfd_open(child.pid)
    child.wait()
    assert container.kill_container("spark-x", handle) == ""


def test_hanging_docker_does_not_stop_the_watchdog(
    host: Host, asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = host.paths.root / "bin/docker"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    client = docker.client
    monkeypatch.setattr(docker, "client", lambda *words, timeout_s: client(*words, timeout_s=0.3))

    watchdog.kill_engine(host.release(), "stalled", "nothing moves", None, host.paths)

    assert asked == [("kill", "--signal=KILL", UNIT)]
    assert "docker kill: no answer within 0 s" in watchdog.events("main", host.paths)[-1].text


@pytest.mark.parametrize("disk", ["full", "hanging"])
def test_unwritable_event_does_not_prevent_the_kill(
    host: Host, engine: subprocess.Popen[bytes], asked: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], disk: str,
) -> None:  # fmt: skip
    healed = threading.Event()

    def write(path: Path, text: str, mode: int = 0o644) -> None:
        if disk == "hanging":
            healed.wait(10)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_text", write)
    monkeypatch.setattr(watchdog, "_NOTE_S", 0.1)
    release, handle = host.release(), os.pidfd_open(engine.pid)
    before = set(threading.enumerate())
    acting = threading.Thread(
        target=watchdog.kill_engine, args=(release, "starving", "too little", handle, host.paths)
    )
    acting.start()
    try:
        assert engine.wait(5) == -9
    finally:
        healed.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
    said = capfd.readouterr().out
    assert "starving: too little; the engine is stopped" in said
    assert "event not kept: " in said


class SeenEnoughError(Exception):
    """Ends the loop of a watch."""


@pytest.mark.parametrize("trouble", ["a member left", "too little memory"])
def test_engine_killed_for_a_lost_member_keeps_its_starts(
    host: Host, asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    host.release()
    low = trouble == "too little memory"

    def act(*said: object) -> None:
        assert trouble in said
        raise SeenEnoughError

    monkeypatch.setattr(watchdog.Floor, "broken", lambda *_: trouble if low else None)
    monkeypatch.setattr(
        watchdog.ClusterWatch, "__init__", lambda self, *_: setattr(self, "lost", trouble)
    )
    monkeypatch.setattr(watchdog.ClusterWatch, "begin", lambda *_: None)
    monkeypatch.setattr(watchdog, "_watch_sensors", lambda *_: None)
    monkeypatch.setattr(watchdog, "kill_engine", act)
    with pytest.raises(SeenEnoughError):
        watchdog.run(RELEASE, host.paths)
    assert asked == ([] if low else [("reset-failed", UNIT)])


def test_hanging_driver_does_not_delay_memory_samples(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.release(watch={"stall_s": 100, "interval_s": 0.01, "hot_celsius": None})
    freed, followed = threading.Event(), threading.Event()
    began, looks = time.monotonic(), 0

    def available() -> int:
        nonlocal looks
        looks += 1
        if looks == 20:
            raise SeenEnoughError
        return 1 << 40

    def metrics(self: Engine, timeout_s: float = 10) -> None:
        raise EngineError("an error says nothing")

    monkeypatch.setattr(watchdog, "available_bytes", available)
    monkeypatch.setattr(Engine, "metrics", metrics)
    monkeypatch.setattr(sensors, "read", lambda: freed.wait(10) and None)
    try:
        with pytest.raises(SeenEnoughError):
            watchdog.run(RELEASE, host.paths)
        assert time.monotonic() - began < 5
    finally:
        freed.set()

    def follow(*_: object) -> None:
        followed.set()
        raise FileNotFoundError(errno.ENOENT, "No such file", "/proc/1234/fd")

    looks = 0
    monkeypatch.setattr(sensors, "read", lambda: None)
    monkeypatch.setattr(gateway, "follow", follow)
    with pytest.raises(SeenEnoughError):
        watchdog.run(RELEASE, host.paths)
    assert followed.is_set()
    assert "/proc/1234/fd" in watchdog.events("main", host.paths)[-1].text


def test_pidfd_is_opened_only_for_this_container(
    engine: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Path(f"/proc/{engine.pid}/cgroup").read_text().splitlines()[-1]
    known = {"Id": group, "State": {"Pid": engine.pid}}
    monkeypatch.setattr(docker, "container", lambda name, limit_s: known)
    handle = container.open_process("spark-x")
    assert handle is not None
    os.close(handle)
    known["Id"] = "f" * 64
    assert container.open_process("spark-x") is None
    known["State"] = {"Pid": 0}  # created, not running
    assert container.open_process("spark-x") is None
    monkeypatch.setattr(docker, "container", lambda name, limit_s: None)
    assert container.open_process("spark-x") is None
