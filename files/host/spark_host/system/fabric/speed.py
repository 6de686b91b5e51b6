"""How much a way between two hosts carries, over TCP: bounded in bytes and in seconds.

No benchmark: it finds a slow cable, a wrong way and packets that are too large for it. The listener
is at one address, takes who knows the word of this one test, and ends by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence

from spark_contract import documents
from spark_contract.errors import HostToolError
from spark_contract.fabric import SpeedFound, SpeedOrder
from spark_contract.paths import Paths

from spark_host.system.programs import answer

_STREAMS = 4  # one alone is bound by one core
_CHUNK_BYTES = 1 << 20
_MEET_S = 10.0  # for both ends to be there
_STRANGERS = 64  # so many with another word, and the listener ends
_AGAIN_S = 0.1
_WELCOME = b"+"
# The last bytes of a stream are lost at its end, instead of waited for.
_AT_ONCE = struct.pack("ii", 1, 0)


def main(words: Sequence[str], paths: Paths) -> int:
    """``listen`` or ``send``, as the order on standard input says."""
    if list(words) not in (["listen"], ["send"]):
        raise HostToolError("fabric-speed", f"{' '.join(words)!r} is no order", "listen or send")
    order = documents.parse(SpeedOrder, sys.stdin.read())
    if words[0] == "listen":
        listen(order)
    else:
        answer(send(order))
    return 0


def listen(order: SpeedOrder) -> None:
    """Take what the sender sends and throw it away.

    Raises:
        HostToolError: the address is not to be had, or no sender came.
    """
    until = time.monotonic() + _MEET_S
    streams: list[socket.socket] = []
    with _listening(order) as listener:
        for _ in range(_STREAMS + _STRANGERS):
            if len(streams) == _STREAMS or (left := until - time.monotonic()) <= 0:
                break
            listener.settimeout(left)
            with contextlib.suppress(TimeoutError):
                stream = listener.accept()[0]
                if _knows_the_word(stream, order.token):
                    streams.append(stream)
                else:
                    stream.close()
    if len(streams) < _STREAMS:
        what = f"{len(streams)} of {_STREAMS} connections came within {_MEET_S:.0f} s"
        raise HostToolError(f"{order.address}:{order.port}", what, "see what the sender says")
    # Only now, so that all begin together.
    until = time.monotonic() + order.most_s + _MEET_S
    for stream in streams:
        stream.sendall(_WELCOME)
    _each(streams, lambda stream: _drained(stream, order.most_bytes, until))


def _listening(order: SpeedOrder) -> socket.socket:
    try:
        return socket.create_server((order.address, order.port), backlog=_STREAMS + _STRANGERS)
    except OSError as error:
        where = f"{order.address}:{order.port}"
        raise HostToolError(where, f"cannot listen ({error})", "run it again") from error


def _knows_the_word(stream: socket.socket, token: str) -> bool:
    stream.settimeout(1.0)
    told = b""
    with contextlib.suppress(OSError):
        while len(told) < len(token) and (more := stream.recv(len(token) - len(told))):
            told += more
    return hmac.compare_digest(told, token.encode())


def _drained(stream: socket.socket, most_bytes: int, until: float) -> None:
    """Have the kernel drop what arrives, to the end, the limit or the time."""
    room, left = bytearray(_CHUNK_BYTES), most_bytes
    with contextlib.suppress(OSError):
        while left > 0 and (left_s := until - time.monotonic()) > 0:
            stream.settimeout(left_s)
            got = stream.recv_into(room, _CHUNK_BYTES, socket.MSG_TRUNC)
            if got == 0:
                return
            left -= got


def send(order: SpeedOrder) -> SpeedFound:
    """Send zeros through one interface until enough was sent, or the time is over.

    Raises:
        HostToolError: the listener is not reached.
    """
    streams = [_joined(order) for _ in range(_STREAMS)]
    for stream in streams:
        _welcomed(stream, order)
    began = time.monotonic()
    arrived = [0] * _STREAMS
    ended = [began] * _STREAMS

    def push(stream: socket.socket) -> None:
        number = streams.index(stream)
        arrived[number] = _sent(stream, order.most_bytes // _STREAMS, began + order.most_s)
        ended[number] = time.monotonic()

    _each(streams, push)
    return SpeedFound(sum(arrived), max(ended) - began)


def _joined(order: SpeedOrder) -> socket.socket:
    until = time.monotonic() + _MEET_S
    while True:
        stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, order.interface.encode())
            stream.settimeout(max(_AGAIN_S, until - time.monotonic()))
            stream.connect((order.address, order.port))
            stream.sendall(order.token.encode())
        except OSError as error:
            stream.close()
            if time.monotonic() + _AGAIN_S > until:
                raise _unreached(order, str(error)) from error
            time.sleep(_AGAIN_S)
        else:
            return stream


def _welcomed(stream: socket.socket, order: SpeedOrder) -> None:
    try:
        told = stream.recv(1)
    except OSError as error:
        raise _unreached(order, str(error)) from error
    if told != _WELCOME:
        raise _unreached(order, "the listener hung up")


def _unreached(order: SpeedOrder, why: str) -> HostToolError:
    return HostToolError(
        f"{order.interface} to {order.address}:{order.port}",
        f"no connection ({why})",
        "see that no firewall is between the hosts, and that the other end is up: ip address",
    )


def _sent(stream: socket.socket, most_bytes: int, until: float) -> int:
    """Return how many bytes the other end has confirmed by then."""
    chunk, handed = memoryview(bytes(_CHUNK_BYTES)), 0
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    with stream, contextlib.suppress(OSError):
        while handed < most_bytes and (left_s := until - time.monotonic()) > 0:
            stream.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                handed += stream.send(chunk[: most_bytes - handed])
        while (waiting := _unconfirmed(stream)) and time.monotonic() < until:
            time.sleep(0.0005)
        return handed - waiting
    return 0


def _unconfirmed(stream: socket.socket) -> int:
    told = fcntl.ioctl(stream, termios.TIOCOUTQ, bytes(4))
    return int(struct.unpack("i", told)[0])


def _each(streams: Sequence[socket.socket], work: Callable[[socket.socket], None]) -> None:
    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
