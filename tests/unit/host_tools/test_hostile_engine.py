import os
import pwd
import resource
import stat
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from socket_servers import accepting, listening
from spark_contract.tool import HostToolError
from spark_host import status
from spark_host.engine import container, serve
from spark_host.engine.client import Engine, EngineError
from spark_host.gateway import gateway
from spark_host.system import docker, systemd
from spark_host.watch import watchdog
from stub_host import RELEASE, write_program

pytestmark = pytest.mark.slow

NOBODY = pwd.getpwnam("nobody")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")


def writable_mounts(host, release):
    argv = container.docker_argv(release, host.paths)
    mounts = [argv[at + 1] for at, word in enumerate(argv) if word == "--mount"]
    fields = [dict(part.partition("=")[::2] for part in text.split(",")) for text in mounts]
    return [Path(field["source"]) for field in fields if "readonly" not in field]


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "shadow"
    path.write_text("root:secret\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def prepared(host, monkeypatch):
    monkeypatch.setattr(docker, "is_up", lambda: True)
    monkeypatch.setattr(serve, "check_artifacts", lambda _: None)
    mount = {"source": "/srv/spark/models/x", "target": "/model", "read_only": True}
    release = host.release(engine__user="nobody", engine__mounts=[mount])
    assert serve.prepare(RELEASE, host.paths) == 0
    return release


@contextmanager
def as_engine():
    os.setegid(NOBODY.pw_gid)
    os.seteuid(NOBODY.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def is_untouched(secret):
    status = secret.stat()
    return (
        secret.read_text() == "root:secret\n"
        and stat.S_IMODE(status.st_mode) == 0o600
        and (status.st_uid, status.st_gid) == (0, 0)
    )


@root_only
def test_engine_cannot_write_to_gateway_folders(host, prepared):
    folder = host.paths.traffic(prepared.service).parent
    assert folder.stat().st_uid == 0
    assert not folder.stat().st_mode & stat.S_IWOTH
    mounts = writable_mounts(host, prepared)
    assert mounts
    for mount in mounts:
        assert mount not in (folder, *folder.parents)
        with as_engine():
            (mount / "probe").write_text("the engine may write to its own mounts")


@root_only
def test_enabling_traffic_does_not_follow_a_symlink_at_the_socket_path(host, prepared, secret):
    docker_socket = secret.with_name("docker.sock")
    link = writable_mounts(host, prepared)[0] / "engine.sock"
    with listening(docker_socket):
        docker_socket.chmod(0o600)
        for target in (secret, docker_socket):
            with as_engine():
                link.unlink(missing_ok=True)
                link.symlink_to(target)
            with pytest.raises((HostToolError, OSError)):
                gateway.open_traffic(prepared, host.paths)
        status = docker_socket.stat()
    assert is_untouched(secret)
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o600, 0)
    assert not gateway.is_open(prepared.service, host.paths)


@root_only
def test_enabling_traffic_replaces_a_symlink_at_the_traffic_file_path(host, prepared, secret):
    folder = host.paths.service_run(prepared.service)
    os.chown(folder, NOBODY.pw_uid, -1)
    traffic_file = host.paths.traffic(prepared.service)
    with as_engine(), listening(host.paths.engine_socket(prepared.service)):
        traffic_file.symlink_to(secret)
        traffic_file.with_name(f".{traffic_file.name}.{os.getpid()}").symlink_to(secret)
    gateway.open_traffic(prepared, host.paths)
    assert is_untouched(secret)
    assert gateway.is_open(prepared.service, host.paths)
    assert not traffic_file.is_symlink()
    with as_engine(), pytest.raises(PermissionError):
        (folder / "more").touch()


@root_only
def test_files_left_by_the_engine_do_not_block_a_start(host, prepared, secret):
    mount = writable_mounts(host, prepared)[0]
    with as_engine():
        (mount / "engine.sock").mkdir()
        (mount / "engine.sock/link").symlink_to(secret)
        (mount / "link").symlink_to(secret.parent)
    assert serve.prepare(RELEASE, host.paths) == 0
    assert list(mount.iterdir()) == []
    assert is_untouched(secret)


@contextmanager
def answering(host, answer):
    release = host.release()

    def serve(connection):
        with connection, suppress(OSError):
            connection.recv(65536)
            answer(connection)

    with accepting(host.paths.engine_socket(release.service), serve):
        yield Engine.for_release(release, host.paths)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def repeat(head, data):
    def answer(connection):
        connection.sendall(HEAD + head)
        while True:
            connection.sendall(data)

    return answer


def send(body):
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    return lambda connection: connection.sendall(head + body)


def trickle_head(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for _ in range(200):
        connection.sendall(b"X")
        time.sleep(0.1)


ENDLESS = {
    "endless samples": repeat(b"\r\n", b"vllm:num_requests_running 1.0\n" * 2048),
    "endless line": repeat(b"\r\ndata: ", b"x" * 65536),
    "endless trailers": repeat(
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"Trailer: x\r\n" * 4096
    ),
    "trickling head": trickle_head,
}  # fmt: skip
LARGE = {
    "many samples": send(b"a 1\n" * 900_000),
    "long sample": send(b"a{" + b'k="",' * 600_000 + b"} 1\n"),
}
DEEP_JSON = send(b"[" * 200_000)


@contextmanager
def memory_limit(limit_bytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert growth <= limit_bytes, f"{growth >> 20} MiB"


@pytest.mark.parametrize("name", [*ENDLESS, *LARGE])
def test_reading_metrics_is_limited_in_bytes_and_time(host, name):
    with answering(host, {**ENDLESS, **LARGE}[name]) as engine:
        start, samples = time.monotonic(), 0
        with memory_limit(64 << 20), suppress(EngineError):
            samples = len(engine.metrics(1).samples)
        assert time.monotonic() - start < 15
        assert samples <= 20_000


@pytest.mark.parametrize("name", ENDLESS)
def test_check_cuts_off_an_endless_response_stream(host, name):
    with answering(host, ENDLESS[name]) as engine:
        start = time.monotonic()
        with memory_limit(96 << 20), pytest.raises(EngineError):
            list(engine.stream_chat({}, 1))
        assert time.monotonic() - start < 15


def test_watchdog_survives_endless_metrics(host):
    detector = watchdog.StallDetector(host.release().watch, 0)
    with answering(host, ENDLESS["endless samples"]) as engine, memory_limit(64 << 20):
        for _ in range(3):
            assert watchdog._find_stall(engine, detector) is None


LONG_ANSWER = b'{"choices":[{"message":{"content":"%s"}}],"usage":{"completion_tokens":8}}'


@pytest.mark.parametrize(
    ("answer", "ok"),
    [
        (DEEP_JSON, False),
        (ENDLESS["endless samples"], False),
        (trickle_head, False),
        (send(LONG_ANSWER % (b"x" * 1_000_000)), True),
    ],
    ids=["deep JSON", "endless", "trickling head", "long answer"],
)
def test_live_status_has_a_short_message(host, answer, ok):
    with answering(host, answer):
        live = status.check_live(host.release(), host.paths, 5 if ok else 1)
    assert live.ok == ok
    assert len(live.detail) <= 300


def test_client_does_not_follow_a_symlink_to_a_socket(host, tmp_path):
    release = host.release()
    path = host.paths.engine_socket(release.service)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / "docker.sock")
    with listening(tmp_path / "docker.sock") as listener:
        listener.settimeout(0.5)
        with pytest.raises((EngineError, HostToolError)):
            Engine.for_release(release, host.paths).get("/health", 1)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_endless_journal_is_read_up_to_a_limit(tmp_path, monkeypatch):
    write_program(tmp_path / "journalctl", "echo first; exec yes 'an endless log of the engine'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    start = time.monotonic()
    with memory_limit(512 << 20):
        lines = systemd.journal("", "spark-serve@x.service")
    assert lines[0] == "first"
    assert time.monotonic() - start < 150
