"""Limits of the gateway against clients without a key."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from recorder import Recorder, recording
from stub_gateway import Door, free_port, running
from stub_host import Host

from spark_deploy.config.checkout import CHECKOUT
from tests.unit.prerequisites import missing

MIB = 1 << 20
STRANGER = "127.0.0.2"


@contextmanager
def gateway_with(host: Host, nginx: Path, **settings: object) -> Iterator[tuple[Door, Recorder]]:
    (host.paths.root / "usr/sbin").mkdir(parents=True, exist_ok=True)
    (host.paths.root / "usr/sbin/nginx").symlink_to(nginx)
    with (
        recording(host.paths.engine_socket("main")) as recorder,
        running(host, engine=False, **settings) as door,
    ):
        yield door, recorder


def knock(
    door: Door, text: bytes, source: str = "127.0.0.1", port: int | None = None
) -> socket.socket:
    """Connect from an address of one's own and send the beginning of something."""
    address = ("127.0.0.1", port or door.settings.port)
    connection = socket.create_connection(address, 10, source_address=(source, 0))
    connection.sendall(text)
    return connection


def status(connection: socket.socket) -> int:
    try:
        head = connection.recv(4096)
    except ConnectionResetError:
        return 0
    return int(head.split(b" ")[1]) if head else 0


def asking(path: str, key: str = "", *, method: str = "POST", length: int = 2) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {length}"]
    lines += [f"X-Api-Key: {key}"] if key else []
    return "\r\n".join([*lines, "", ""]).encode()


def kept_bytes(door: Door) -> dict[str, int]:
    """Return the bytes of bodies in files, by top folder; nginx unlinks each while it has it."""
    found = {"run": 0, "var": 0}
    master = door.process.pid
    workers = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    for entry in (entry for pid in workers for entry in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            target = Path(os.readlink(entry))
            if "body" in target.parts:
                top = target.relative_to(door.host.paths.root).parts[0]
                found[top] += entry.stat().st_size
    return found


@pytest.mark.parametrize("path", ["/health", "/v1/chat/completions", "/metrics", "/"])
def test_body_without_key_is_not_stored(host: Host, nginx_program: Path, path: str) -> None:
    with (
        gateway_with(host, nginx_program, max_body_bytes=8 * MIB) as (door, _),
        ExitStack() as open_,
    ):
        for _ in range(10):
            connection = open_.enter_context(knock(door, asking(path, length=8 * MIB)))
            connection.settimeout(2)
            with contextlib.suppress(OSError):
                connection.sendall(b"x" * 4 * MIB)
        time.sleep(0.5)
        assert kept_bytes(door) == {"run": 0, "var": 0}


@pytest.mark.parametrize("method", ["POST", "PUT", "HEAD"])
def test_health_accepts_only_get_without_body(host: Host, nginx_program: Path, method: str) -> None:
    with gateway_with(host, nginx_program) as (door, recorder):
        with knock(door, asking("/health", method=method, length=0)) as connection:
            assert status(connection) == 405
        with knock(door, asking("/health", method=method) + b"{}") as connection:
            assert status(connection) == 413
        with knock(door, asking("/health", method="GET", length=4000)) as connection:
            assert status(connection) == 413
        assert door.ask("/health")[0] == 200
        assert recorder.taken() == ["GET /health HTTP/1.1"]


def test_large_bodies_are_stored_on_disk(host: Host, nginx_program: Path) -> None:
    with gateway_with(host, nginx_program, max_body_bytes=8 * MIB) as (door, recorder):
        with knock(door, asking("/v1/completions", door.key, length=8 * MIB)) as connection:
            connection.sendall(b"x" * (8 * MIB - 1))
            time.sleep(0.5)
            kept = kept_bytes(door)
            assert kept["run"] == 0
            assert kept["var"] >= 6 * MIB
            connection.sendall(b"x")
            assert status(connection) == 200
        assert recorder.bodies == [8 * MIB]
        time.sleep(0.2)
        assert kept_bytes(door)["var"] == 0


def test_number_of_large_bodies_is_limited(host: Host, nginx_program: Path) -> None:
    length = 200_000
    with (
        gateway_with(host, nginx_program, max_body_bytes=MIB) as (door, recorder),
        ExitStack() as open_,
    ):
        begun = [
            open_.enter_context(knock(door, asking("/v1/completions", door.key, length=length)))
            for _ in range(40)
        ]
        for connection in begun:
            connection.settimeout(1)
            with contextlib.suppress(OSError):
                connection.sendall(b"x" * (length - 1))
        time.sleep(1)
        told, _, _ = select.select(begun, [], [], 0)
        assert [status(connection) for connection in told] == [429] * 8
        assert kept_bytes(door)["var"] <= 32 * length
        # Small requests continue meanwhile.
        assert door.chat(Authorization=f"Bearer {door.key}") == 200
        assert recorder.bodies


def test_large_bodies_without_key_do_not_block_clients(host: Host, nginx_program: Path) -> None:
    # A refused request continues while nginx discards the body, without a share of the limit.
    with (
        gateway_with(host, nginx_program, max_body_bytes=8 * MIB) as (door, recorder),
        ExitStack() as open_,
    ):
        for number in range(60):
            path = ("/v1/completions", "/health", "/none")[number % 3]
            begun = open_.enter_context(knock(door, asking(path, length=8 * MIB), STRANGER))
            begun.sendall(b"x" * 200_000)
        with knock(door, asking("/v1/completions", door.key, length=2 * MIB)) as connection:
            connection.sendall(b"x" * 2 * MIB)
            assert status(connection) == 200
        assert recorder.bodies == [2 * MIB]


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/none"])
def test_balancer_stores_no_body_without_key(host: Host, nginx_program: Path, path: str) -> None:
    replicas = {"port": free_port(), "others": []}
    with (
        gateway_with(host, nginx_program, max_body_bytes=8 * MIB, replicas=replicas) as (door, _),
        ExitStack() as open_,
    ):
        for _ in range(10):
            text = asking(path, length=8 * MIB)
            connection = open_.enter_context(knock(door, text, port=replicas["port"]))
            connection.settimeout(2)
            with contextlib.suppress(OSError):
                connection.sendall(b"x" * 4 * MIB)
        time.sleep(0.5)
        assert kept_bytes(door) == {"run": 0, "var": 0}


@pytest.mark.parametrize(
    ("path", "key"),
    [("/v1/models", "wrong"), ("/v1/models", ""), ("/no-such-path", ""), ("/health", "")],
)
def test_request_rate_is_limited_per_address(
    host: Host, nginx_program: Path, path: str, key: str
) -> None:
    with gateway_with(host, nginx_program, max_requests_per_s=5) as (door, _):
        found = []
        for _ in range(40):
            with knock(door, asking(path, key, method="GET", length=0), STRANGER) as connection:
                found.append(status(connection))
        assert 429 in found
        assert found.index(429) <= 20
        # The limit is that of an address, not of all.
        assert door.ask("/v1/models", Authorization=f"Bearer {door.key}")[0] == 200


def test_connections_are_limited_per_address(host: Host, nginx_program: Path) -> None:
    with gateway_with(host, nginx_program, max_connections=5) as (door, recorder):
        recorder.hold.clear()
        with ExitStack() as open_:
            text = asking("/v1/models", door.key, method="GET", length=0)
            begun = [open_.enter_context(knock(door, text, STRANGER)) for _ in range(8)]
            for connection in begun:
                connection.settimeout(0.3)
            found = []
            for connection in begun:
                with contextlib.suppress(TimeoutError):
                    found.append(status(connection))
            assert found == [429] * 3
            recorder.hold.set()
            assert door.ask("/v1/models", Authorization=f"Bearer {door.key}")[0] == 200


@pytest.mark.parametrize("beginning", [b"", b"GET /v1/models HTTP/1.1\r\nX-"], ids=["idle", "half"])
def test_idle_connections_do_not_block_clients(
    host: Host, nginx_program: Path, beginning: bytes
) -> None:
    with gateway_with(host, nginx_program) as (door, _), ExitStack() as open_:
        for number in range(2300):
            with contextlib.suppress(OSError):
                source = f"127.0.0.{2 + number % 3}"
                open_.enter_context(knock(door, beginning, source))
        start = time.monotonic()
        assert door.ask("/v1/models", Authorization=f"Bearer {door.key}")[0] == 200
        assert time.monotonic() - start < 2


@pytest.mark.slow
def test_endless_header_is_cut(host: Host, nginx_program: Path) -> None:
    with gateway_with(host, nginx_program) as (door, _):
        connection = knock(door, b"GET /v1/models HTTP/1.1\r\n")
        connection.settimeout(30)
        start, number = time.monotonic(), 0
        with contextlib.suppress(OSError):
            while time.monotonic() - start < 25:
                connection.sendall(b"X-%d: y\r\n" % number)
                number += 1
                connection.settimeout(1)
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1):
                        break
        assert time.monotonic() - start < 20


def test_headers_of_all_connections_fit_into_memory(host: Host, nginx_program: Path) -> None:
    # Over TLS a head of 33 KiB cost 60 KiB, and 16384 of them a gigabyte, the gateway's limit.
    with gateway_with(host, nginx_program) as (door, _):
        fields = "".join(f"X-{number}: {'y' * 7900}\r\n" for number in range(3))
        large = f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode()
        assert status(knock(door, large)) == 400
        name = "x" * 7900
        usual = asking(f"/v1/models?{name}", door.key, method="GET", length=0)
        assert status(knock(door, usual)) == 200
    unit = (CHECKOUT / "files/units/spark-gateway@.service").read_text()
    # If it does not fit, nginx replaces the worker.
    assert "OOMPolicy=continue" in unit


def test_settings_without_limits_are_valid(host: Host) -> None:
    assert host.gateway().max_connections is None


@pytest.fixture(autouse=True)
def _root_only() -> None:
    if os.geteuid() != 0:
        missing("needs root, to run nginx as its own account")


def test_refused_key_is_logged_without_the_key(host: Host, nginx_program: Path) -> None:
    journal = host.paths.root / "run/systemd/journal/dev-log"
    journal.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as noted:
        noted.bind(str(journal))
        noted.settimeout(10)
        with gateway_with(host, nginx_program) as (door, _):
            journal.chmod(0o666)
            path = "/v1/models?api_key=sk-in-the-query"
            wrong = asking(path, "sk-not-it", method="GET", length=0)
            with knock(door, wrong, STRANGER) as connection:
                assert status(connection) == 401
            line = noted.recv(4096).decode()
            right = asking("/v1/models", door.key, method="GET", length=0)
            with knock(door, right) as connection:
                assert status(connection) == 200
            with knock(door, asking("/none", method="GET", length=0)) as connection:
                assert status(connection) == 404
            noted.settimeout(0.5)
            with pytest.raises(TimeoutError):
                noted.recv(4096)
    assert line.endswith(f"{STRANGER} was refused for its key: GET /v1/models")
    assert "sk-" not in line


def test_log_of_refused_keys_is_rate_limited() -> None:
    unit = (CHECKOUT / "files/units/spark-gateway@.service").read_text()
    assert "LogRateLimitIntervalSec=60" in unit
    assert "LogRateLimitBurst=20" in unit
