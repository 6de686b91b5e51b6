"""Connections of the controller send small packets at once."""

import socket
from types import SimpleNamespace

import paramiko
import pytest

from spark_deploy.inventory.contact.ssh import NoDelay, no_delay


@pytest.fixture
def connected():
    """Return a host as pyinfra has it: a paramiko client over a real TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        transport = paramiko.Transport(sock)
        client = SimpleNamespace(get_transport=lambda: transport)
        yield SimpleNamespace(connector=SimpleNamespace(client=client)), sock
        transport.close()
        sock.close()


def option(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_option_is_set_at_the_top_of_a_deploy_and_once_per_run(connected):
    host, sock = connected
    handlers = []
    state = SimpleNamespace(callback_handlers=handlers, add_callback_handler=handlers.append)
    assert option(sock) == 0
    no_delay(state, host)
    no_delay(state, host)
    assert option(sock) == 1
    assert [type(handler) for handler in handlers] == [NoDelay]


def test_a_reconnect_gets_it_too(connected):
    host, sock = connected
    NoDelay.host_connect(SimpleNamespace(), host)
    assert option(sock) == 1


def test_this_machine_has_no_connection_to_set_it_on():
    NoDelay.host_connect(SimpleNamespace(), SimpleNamespace(connector=object()))
