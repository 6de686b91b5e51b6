"""A hostile engine cannot make root change other files."""

from __future__ import annotations

import os
import pwd
import resource
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from spark_contract.errors import HostToolError
from spark_contract.release import Release
from spark_host import status
from spark_host.engine import container, serve
from spark_host.engine.client import Engine, EngineError
from spark_host.gateway import traffic
from spark_host.system import docker, systemd
from spark_host.watch import watchdog
from stub_host import RELEASE, Host, release_data

NOBODY = pwd.getpwnam("nobody")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")


def mounted_for(host: Host, release: Release) -> list[Path]:
    argv = container.docker_argv(release, host.paths)
    mounts = [argv[at + 1] for at, word in enumerate(argv) if word == "--mount"]
    fields = [dict(part.partition("=")[::2] for part in text.split(",")) for text in mounts]
    return [Path(field["source"]) for field in fields if "readonly" not in field]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "shadow"
    path.write_text("root:secret\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def prepared(host: Host, monkeypatch: pytest.MonkeyPatch) -> Release:
    monkeypatch.setattr(docker, "is_up", lambda: True)
    monkeypatch.setattr(serve, "check_artifacts", lambda _: None)
    release = host.release(engine={**release_data()["engine"], "user": "nobody"})
    assert serve.prepare(RELEASE, host.paths) == 0
    return release


@contextmanager
def as_nobody() -> Iterator[None]:
    os.setegid(NOBODY.pw_gid)
    os.seteuid(NOBODY.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def untouched(victim: Path) -> bool:
    seen = victim.stat()
    return (
        victim.read_text() == "root:secret\n"
        and stat.S_IMODE(seen.st_mode) == 0o600
        and (seen.st_uid, seen.st_gid) == (0, 0)
    )


@root_only
def test_engine_cannot_write_to_gateway_folders(host: Host, prepared: Release) -> None:
    folder = host.paths.traffic(prepared.service).parent
    assert folder.stat().st_uid == 0
    assert not folder.stat().st_mode & stat.S_IWOTH
    given = mounted_for(host, prepared)
    assert given
    for outside in given:
        assert outside not in (folder, *folder.parents)
        with as_nobody():
            (outside / "probe").write_text("the engine may write here")


@root_only
def test_opening_traffic_follows_no_link_at_the_socket(
    host: Host, prepared: Release, victim: Path
) -> None:
    outside = mounted_for(host, prepared)[0]
    with as_nobody():
        (outside / "engine.sock").symlink_to(victim)
    with pytest.raises((HostToolError, OSError)):
        traffic.open_for(prepared, host.paths)
    assert untouched(victim)
    assert not traffic.is_open(prepared.service, host.paths)


@root_only
def test_opening_traffic_follows_no_link_at_the_traffic_file(
    host: Host, prepared: Release, victim: Path
) -> None:
    folder = host.paths.service_run(prepared.service)
    os.chown(folder, NOBODY.pw_uid, -1)
    opened = host.paths.traffic(prepared.service)
    with as_nobody(), listening(host.paths.engine_socket(prepared.service)):
        opened.symlink_to(victim)
        opened.with_name(f".{opened.name}.{os.getpid()}").symlink_to(victim)
    traffic.open_for(prepared, host.paths)
    assert untouched(victim)
    assert traffic.is_open(prepared.service, host.paths)
    assert not opened.is_symlink()
    with as_nobody(), pytest.raises(PermissionError):
        (folder / "more").touch()


@root_only
def test_leftovers_of_the_engine_do_not_block_a_start(
    host: Host, prepared: Release, victim: Path
) -> None:
    outside = mounted_for(host, prepared)[0]
    with as_nobody():
        (outside / "engine.sock").mkdir()
        (outside / "engine.sock/link").symlink_to(victim)
        (outside / "link").symlink_to(victim.parent)
    assert serve.prepare(RELEASE, host.paths) == 0
    assert list(outside.iterdir()) == []
    assert untouched(victim)


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        yield listener


Speech = Callable[[socket.socket], None]


@contextmanager
def engine_that(host: Host, speech: Speech) -> Iterator[Engine]:
    """Run a server in the engine's place that answers every request with ``speech``."""
    release = host.release()
    path = host.paths.engine_socket(release.service)
    path.parent.mkdir(parents=True, exist_ok=True)

    def serve_all(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                try:
                    speech(connection)
                except OSError:
                    continue

    with listening(path) as listener:
        thread = threading.Thread(target=serve_all, args=(listener,), daemon=True)
        thread.start()
        yield Engine.of(release, host.paths)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def endless(connection: socket.socket) -> None:
    """Send samples without an end, as fast as they are taken."""
    connection.sendall(HEAD + b"\r\n")
    while True:
        connection.sendall(b"vllm:num_requests_running 1.0\n" * 2048)


def endless_line(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\ndata: ")
    while True:
        connection.sendall(b"x" * 65536)


def endless_chunks(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n")
    while True:
        connection.sendall(b"Trailer: x\r\n" * 4096)


def trickling_head(connection: socket.socket) -> None:
    """Send the head of an answer a byte at a time; no single read waits for long."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for _ in range(200):
        connection.sendall(b"X")
        time.sleep(0.1)


def many_samples(connection: socket.socket) -> None:
    body = b"a 1\n" * 900_000
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def one_long_sample(connection: socket.socket) -> None:
    body = b"a{" + b'k="",' * 600_000 + b"} 1\n"
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def deep_json(connection: socket.socket) -> None:
    body = b"[" * 200_000
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)


@contextmanager
def grown_by_at_most(limit_bytes: int) -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown <= limit_bytes, f"{grown >> 20} MiB"


@pytest.mark.parametrize(
    "speech",
    [endless, endless_line, endless_chunks, trickling_head, many_samples, one_long_sample],
)
def test_metrics_are_limited_in_bytes_and_time(host: Host, speech: Speech) -> None:
    with engine_that(host, speech) as engine:
        start = time.monotonic()
        with grown_by_at_most(64 << 20):
            try:
                samples = len(engine.metrics(2).samples)
            except EngineError:
                samples = 0
        assert time.monotonic() - start < 4
        assert samples <= 20_000


@pytest.mark.parametrize("speech", [endless, endless_line, endless_chunks, trickling_head])
def test_endless_stream_is_cut(host: Host, speech: Speech) -> None:
    with engine_that(host, speech) as engine:
        start = time.monotonic()
        with grown_by_at_most(96 << 20), pytest.raises(EngineError):
            list(engine.stream_chat({}, 3))
        assert time.monotonic() - start < 5


def test_watchdog_survives_endless_metrics(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = watchdog.StallDetector(host.release().watch, 0)
    with engine_that(host, endless) as engine, grown_by_at_most(64 << 20):
        for _ in range(3):
            assert watchdog._sample(engine, judge) is None


@pytest.mark.parametrize("speech", [deep_json, endless, trickling_head])
def test_live_status_ends_with_a_short_message(host: Host, speech: Speech) -> None:
    with engine_that(host, speech):
        found = status.ask(host.release(), host.paths, 2)
    assert not found.ok
    assert len(found.detail) <= 300


def test_live_status_cuts_a_long_answer(host: Host) -> None:
    text = '{"choices":[{"message":{"content":"%s"}}],"usage":{"completion_tokens":8}}'
    body = (text % ("x" * 1_000_000)).encode()

    def speech(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    with engine_that(host, speech):
        found = status.ask(host.release(), host.paths, 5)
    assert found.ok
    assert len(found.detail) <= 300


def test_client_follows_no_link_to_a_socket(host: Host, tmp_path: Path) -> None:
    release = host.release()
    elsewhere = tmp_path / "docker.sock"
    path = host.paths.engine_socket(release.service)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(elsewhere)
    with listening(elsewhere) as listener:
        listener.settimeout(0.5)
        with pytest.raises((EngineError, HostToolError)):
            Engine.of(release, host.paths).get("/health", 1)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_endless_journal_is_read_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "journalctl"
    program.write_text("#!/bin/sh\necho first\nexec yes 'the engine says no end of things'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    start = time.monotonic()
    with grown_by_at_most(512 << 20):
        lines = systemd.journal("", "spark-serve@x.service")
    assert lines[0] == "first"
    assert time.monotonic() - start < 30
