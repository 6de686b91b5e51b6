"""The throughput test is limited, needs a token, and ends by itself."""

import dataclasses
import io
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from gateway_client import free_port
from spark_contract.documents import to_json
from spark_contract.status import SpeedRequest
from spark_contract.tool import HostToolError
from spark_host.system import fabric
from stub_host import Paths

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def speed_request():
    return SpeedRequest("lo", "127.0.0.1", free_port(), TOKEN, 20_000_000, 2.0)


@contextmanager
def listening(speed_request):
    thread = threading.Thread(target=fabric.listen, args=(speed_request,), daemon=True)
    thread.start()
    yield
    thread.join(10)
    assert not thread.is_alive()


def connect(speed_request):
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((speed_request.address, speed_request.port), 1)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_sends_exactly_as_many_bytes_as_the_request_on_stdin_allows(speed_request, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(to_json(speed_request)))
    with listening(speed_request):
        result = fabric.measure_speed(["send"], Paths("/"))
    assert isinstance(result, fabric.SpeedResult)
    assert result.arrived_bytes == speed_request.max_bytes
    assert 0 < result.took_s < speed_request.max_s
    with pytest.raises(HostToolError, match="listen` or `fabric-speed send"):
        fabric.measure_speed(["send", TOKEN], Paths("/"))


def test_stalled_receiver_ends_at_the_time_limit(speed_request):
    slow = dataclasses.replace(speed_request, max_bytes=10**9, max_s=0.5)
    streams = []

    def receive_nothing():
        with socket.create_server((slow.address, slow.port)) as listener:
            streams.extend(listener.accept()[0] for _ in range(4))
            for stream in streams:
                stream.recv(len(TOKEN))
                stream.sendall(b"+")

    threading.Thread(target=receive_nothing, daemon=True).start()
    began = time.monotonic()
    result = fabric.send(slow)
    assert time.monotonic() - began < 30
    assert result.arrived_bytes < slow.max_bytes / 4
    assert result.took_s < 30


def test_wrong_token_is_rejected(speed_request):
    with listening(speed_request):
        with connect(speed_request) as stranger:
            stranger.sendall(b"x" * len(TOKEN))
            assert stranger.recv(1) == b""
        assert fabric.send(speed_request).arrived_bytes == speed_request.max_bytes


def test_trickling_stranger_does_not_end_the_measurement(speed_request):
    def trickle(stranger):
        with stranger, suppress(OSError):
            for _ in TOKEN:
                stranger.sendall(b"x")
                time.sleep(0.5)

    with listening(speed_request):
        threading.Thread(target=trickle, args=(connect(speed_request),), daemon=True).start()
        time.sleep(0.1)
        assert fabric.send(speed_request).arrived_bytes == speed_request.max_bytes


def test_listens_only_on_the_fabric_address(speed_request):
    with listening(speed_request):
        connect(speed_request).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", speed_request.port), 1)
        fabric.send(speed_request)


def test_listener_times_out(speed_request, monkeypatch):
    monkeypatch.setattr(fabric, "_CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(HostToolError, match="0 of 4 connections"):
        fabric.listen(speed_request)


@pytest.mark.parametrize(
    ("interface", "message"),
    [("lo", r"lo to 127.0.0.1:\d+.*no connection.*firewall"), ("fab7", "No such device")],
)
def test_reports_a_missing_listener_or_interface(speed_request, monkeypatch, interface, message):
    monkeypatch.setattr(fabric, "_CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(HostToolError, match=message):
        fabric.send(dataclasses.replace(speed_request, interface=interface))
