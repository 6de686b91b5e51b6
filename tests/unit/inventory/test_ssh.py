"""Connections of the controller send small packets at once, and end when the host is gone."""

import socket
from types import SimpleNamespace

from spark_deploy.inventory.host_keys import transport


def test_the_options_are_set_before_the_first_byte_is_sent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        made = transport(sock, gss_kex=False)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        made.close()


def test_a_connection_through_another_process_has_none():
    way = SimpleNamespace(settimeout=lambda seconds: None, close=lambda: None)
    transport(way).close()
