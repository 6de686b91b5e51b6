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
from spark_contract.errors import HostToolError
from spark_contract.fabric import SpeedOrder, SpeedResult
from spark_contract.paths import Paths

_STREAMS = 4  # a single stream is limited by a core
_CHUNK_BYTES = 1 << 20
_MEET_S = 10.0  # until both sides are connected
_TOKEN_S = 1.0  # for the whole token of a connection
_STRANGERS = 64  # connections with a wrong token before the listener exits
_RETRY_S = 0.1
_WELCOME = b"+"
# Close a stream without waiting for the last bytes.
_LINGER = struct.pack("ii", 1, 0)


def main(words: Sequence[str], paths: Paths) -> int | SpeedResult:
    """``listen`` or ``send``, with a ``SpeedOrder`` on standard input."""
    if list(words) not in (["listen"], ["send"]):
        fix = "use listen or send"
        raise HostToolError("fabric-speed", f"unknown arguments {list(words)}", fix)
    order = documents.parse(SpeedOrder, sys.stdin.read())
    if words[0] == "send":
        return send(order)
    listen(order)
    return 0


def listen(order: SpeedOrder) -> None:
    """Receive the sender's data and discard it; ``HostToolError`` if no sender connects."""
    until = time.monotonic() + _MEET_S
    streams: list[socket.socket] = []
    where = f"{order.address}:{order.port}"
    try:
        server = socket.create_server((order.address, order.port), backlog=_STREAMS + _STRANGERS)
    except OSError as error:
        raise HostToolError(where, f"cannot listen ({error})", "run it again") from error
    with server:
        for _ in range(_STREAMS + _STRANGERS):
            if len(streams) == _STREAMS or (left_s := until - time.monotonic()) <= 0:
                break
            server.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                stream = server.accept()[0]
                if _has_token(stream, order.token):
                    streams.append(stream)
                else:
                    stream.close()
    if len(streams) < _STREAMS:
        message = f"only {len(streams)} of {_STREAMS} connections within {_MEET_S:.0f} s"
        raise HostToolError(where, message, "see the sender's error")
    # Welcome them only now, so that all streams start at the same time.
    until = time.monotonic() + order.max_s + _MEET_S
    for stream in streams:
        stream.sendall(_WELCOME)
    with ThreadPoolExecutor(_STREAMS) as pool:
        for stream in streams:
            pool.submit(_discard, stream, order.max_bytes, until)


def _has_token(stream: socket.socket, token: str) -> bool:
    until = time.monotonic() + _TOKEN_S
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < len(token) and (left_s := until - time.monotonic()) > 0:
            stream.settimeout(left_s)
            if not (more := stream.recv(len(token) - len(received))):
                break
            received += more
    return hmac.compare_digest(received, token.encode())


def _discard(stream: socket.socket, max_bytes: int, until: float) -> None:
    buffer, remaining_bytes = bytearray(_CHUNK_BYTES), max_bytes
    with contextlib.suppress(OSError):
        while remaining_bytes > 0 and (left_s := until - time.monotonic()) > 0:
            stream.settimeout(left_s)
            count = stream.recv_into(buffer, _CHUNK_BYTES, socket.MSG_TRUNC)
            if count == 0:
                return
            remaining_bytes -= count


def send(order: SpeedOrder) -> SpeedResult:
    """Send zeros up to the limits of the order; ``HostToolError`` if nothing listens."""
    streams = [_connect(order) for _ in range(_STREAMS)]
    for stream in streams:
        try:
            received = stream.recv(1)
        except OSError as error:
            raise _connection_error(order, str(error)) from error
        if received != _WELCOME:
            raise _connection_error(order, "the listener closed the connection")
    began = time.monotonic()

    def push(stream: socket.socket) -> tuple[int, float]:
        arrived = _send_zeros(stream, order.max_bytes // _STREAMS, began + order.max_s)
        return arrived, time.monotonic()

    with ThreadPoolExecutor(_STREAMS) as pool:
        results = list(pool.map(push, streams))
    arrived_bytes = sum(arrived for arrived, _ in results)
    return SpeedResult(arrived_bytes, max(ended for _, ended in results) - began)


def _connect(order: SpeedOrder) -> socket.socket:
    until = time.monotonic() + _MEET_S
    while True:
        stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, order.interface.encode())
            stream.settimeout(max(_RETRY_S, until - time.monotonic()))
            stream.connect((order.address, order.port))
            stream.sendall(order.token.encode())
        except OSError as error:
            stream.close()
            if time.monotonic() + _RETRY_S > until:
                raise _connection_error(order, str(error)) from error
            time.sleep(_RETRY_S)
        else:
            return stream


def _connection_error(order: SpeedOrder, reason: str) -> HostToolError:
    return HostToolError(
        f"{order.interface} to {order.address}:{order.port}",
        f"no connection ({reason})",
        "check for a firewall between the hosts, and that the other port is up: ip address",
    )


def _send_zeros(stream: socket.socket, max_bytes: int, until: float) -> int:
    chunk, sent_bytes = memoryview(bytes(_CHUNK_BYTES)), 0
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
    with stream, contextlib.suppress(OSError):
        while sent_bytes < max_bytes and (left_s := until - time.monotonic()) > 0:
            stream.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                sent_bytes += stream.send(chunk[: max_bytes - sent_bytes])
        while True:
            queue = fcntl.ioctl(stream, termios.TIOCOUTQ, bytes(4))  # not acknowledged
            waiting = int.from_bytes(queue, sys.byteorder)
            if not waiting or time.monotonic() >= until:
                return sent_bytes - waiting
            time.sleep(0.0005)
    return 0
