"""Make pyinfra's SSH connections fast, and have them end when the host is gone."""

from __future__ import annotations

import socket
from typing import Any

from paramiko import Transport

GONE_AFTER_S = 60
_OPTIONS = (
    # Each command costs 40 ms more without it, and so does the login.
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    # A host without power or cable says nothing: a command there would wait for ever, and all
    # other hosts with it.
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", GONE_AFTER_S // 4),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", GONE_AFTER_S // 4),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", GONE_AFTER_S * 1000),
)


def transport(sock: Any, **keywords: Any) -> Transport:
    """Return the transport of a connection, whose options hold from its first byte on.

    A connection through another process has no socket to set them on.
    """
    if isinstance(sock, socket.socket):
        for level, name, value in _OPTIONS:
            option = getattr(socket, name, None)  # not every system has all of them
            if option is not None:
                sock.setsockopt(level, option, value)
    return Transport(sock, **keywords)
