"""Measures the TCP throughput between two hosts, limited in bytes and in seconds.

It finds slow cables, wrong routes and packets that are too large. The listener uses a single
address, accepts only the holder of a one-time token, and then exits.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import socket
import struct
import sys
import termios
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from spark_contract import documents
from spark_contract.paths import Paths
from spark_contract.status import SpeedRequest, SpeedResult
from spark_contract.tool import HostToolError

_STREAMS = 4  # because a single stream is limited by one core
_CHUNK_BYTES = 1 << 20
_CONNECT_TIMEOUT_S = 10.0  # for both sides to connect
_TOKEN_TIMEOUT_S = 1.0  # for the whole token of a connection
_MAX_STRANGERS = 64  # connections with a wrong token before the listener exits
_RETRY_INTERVAL_S = 0.1
_WELCOME = b"+"
# Close a stream without waiting for the last bytes.
_LINGER = struct.pack("ii", 1, 0)


def main(args: Sequence[str], paths: Paths) -> int | SpeedResult:
    """Run ``listen`` or ``send`` with a ``SpeedRequest`` from standard input."""
    if list(args) not in (["listen"], ["send"]):
        fix = "run `spark-host fabric-speed listen` or `fabric-speed send`"
        raise HostToolError("fabric-speed", f"invalid arguments {list(args)}", fix)
    request = documents.parse(SpeedRequest, sys.stdin.read())
    if args[0] == "send":
        return send(request)
    listen(request)
    return 0


def listen(request: SpeedRequest) -> None:
    """Receive and discard the sender's data; raise HostToolError if no sender connects."""
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    streams: list[socket.socket] = []
    where = f"{request.address}:{request.port}"
    try:
        server = socket.create_server(
            (request.address, request.port), backlog=_STREAMS + _MAX_STRANGERS
        )
    except OSError as error:
        raise HostToolError(where, f"cannot listen ({error})", "run the command again") from error
    with server:
        for _ in range(_STREAMS + _MAX_STRANGERS):
            if len(streams) == _STREAMS or (remaining_s := deadline - time.monotonic()) <= 0:
                break
            server.settimeout(remaining_s)
            with contextlib.suppress(TimeoutError):
                stream = server.accept()[0]
                if _receives_token(stream, request.token):
                    streams.append(stream)
                else:
                    stream.close()
    if len(streams) < _STREAMS:
        count = f"only {len(streams)} of {_STREAMS} connections"
        message = f"{count} were established within {_CONNECT_TIMEOUT_S:.0f} s"
        raise HostToolError(where, message, "see the sender's error")
    # Accept the streams only now, so that all start at the same time.
    deadline = time.monotonic() + request.max_s + _CONNECT_TIMEOUT_S
    for stream in streams:
        stream.sendall(_WELCOME)
    with ThreadPoolExecutor(_STREAMS) as pool:
        for stream in streams:
            pool.submit(_discard, stream, request.max_bytes, deadline)


def _receives_token(stream: socket.socket, token: str) -> bool:
    deadline = time.monotonic() + _TOKEN_TIMEOUT_S
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < len(token) and (remaining_s := deadline - time.monotonic()) > 0:
            stream.settimeout(remaining_s)
            if not (more := stream.recv(len(token) - len(received))):
                break
            received += more
    return hmac.compare_digest(received, token.encode())


def _discard(stream: socket.socket, max_bytes: int, deadline: float) -> None:
    buffer, remaining_bytes = bytearray(_CHUNK_BYTES), max_bytes
    with contextlib.suppress(OSError):
        while remaining_bytes > 0 and (remaining_s := deadline - time.monotonic()) > 0:
            stream.settimeout(remaining_s)
            count = stream.recv_into(buffer, _CHUNK_BYTES, socket.MSG_TRUNC)
            if count == 0:
                return
            remaining_bytes -= count


def send(request: SpeedRequest) -> SpeedResult:
    """Send zeros up to the limits of the request; raise HostToolError if no listener responds."""
    streams = [_connect(request) for _ in range(_STREAMS)]
    for stream in streams:
        try:
            received = stream.recv(1)
        except OSError as error:
            raise _connection_error(request, str(error)) from error
        if received != _WELCOME:
            raise _connection_error(request, "the listener closed the connection")
    began = time.monotonic()

    def push(stream: socket.socket) -> tuple[int, float]:
        arrived = _send_zeros(stream, request.max_bytes // _STREAMS, began + request.max_s)
        return arrived, time.monotonic()

    with ThreadPoolExecutor(_STREAMS) as pool:
        results = list(pool.map(push, streams))
    arrived_bytes = sum(arrived for arrived, _ in results)
    return SpeedResult(arrived_bytes, max(ended for _, ended in results) - began)


def _connect(request: SpeedRequest) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, request.interface.encode())
            stream.settimeout(max(_RETRY_INTERVAL_S, deadline - time.monotonic()))
            stream.connect((request.address, request.port))
            stream.sendall(request.token.encode())
        except OSError as error:
            stream.close()
            if time.monotonic() + _RETRY_INTERVAL_S > deadline:
                raise _connection_error(request, str(error)) from error
            time.sleep(_RETRY_INTERVAL_S)
        else:
            return stream


def _connection_error(request: SpeedRequest, reason: str) -> HostToolError:
    return HostToolError(
        f"{request.interface} to {request.address}:{request.port}",
        f"no connection ({reason})",
        "check that the other port is up (`ip address`) and that no firewall blocks it",
    )


def _send_zeros(stream: socket.socket, max_bytes: int, deadline: float) -> int:
    chunk, sent_bytes = memoryview(bytes(_CHUNK_BYTES)), 0
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
    with stream, contextlib.suppress(OSError):
        while sent_bytes < max_bytes and (remaining_s := deadline - time.monotonic()) > 0:
            stream.settimeout(remaining_s)
            with contextlib.suppress(TimeoutError):
                sent_bytes += stream.send(chunk[: max_bytes - sent_bytes])
        while True:
            queue = fcntl.ioctl(stream, termios.TIOCOUTQ, bytes(4))  # not acknowledged
            waiting = int.from_bytes(queue, sys.byteorder)
            if not waiting or time.monotonic() >= deadline:
                return sent_bytes - waiting
            time.sleep(0.0005)
    return 0
