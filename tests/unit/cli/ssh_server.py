"""An SSH server on localhost that accepts one password or public keys; commands run here."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import paramiko


@dataclass
class Host:
    password: str | None = None
    keys: Sequence[str] = ()
    host_key: paramiko.PKey = field(default_factory=paramiko.ECDSAKey.generate)
    port: int = 0
    tried: list[str] = field(default_factory=list)


class _Session(paramiko.ServerInterface):
    def __init__(self, host: Host):
        self.host = host

    def get_allowed_auths(self, username: str) -> str:
        return "publickey,password"

    def check_auth_password(self, username: str, password: str) -> int:
        self.host.tried.append(password)
        is_right = password == self.host.password
        return paramiko.AUTH_SUCCESSFUL if is_right else paramiko.AUTH_FAILED

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        is_known = key.get_base64() in self.host.keys
        return paramiko.AUTH_SUCCESSFUL if is_known else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=_execute, args=(channel, command), daemon=True).start()
        return True


def _execute(channel: paramiko.Channel, command: bytes) -> None:
    done = subprocess.run(
        command, shell=True, capture_output=True, stdin=subprocess.DEVNULL, check=False,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    channel.sendall(done.stdout)
    channel.sendall_stderr(done.stderr)
    channel.send_exit_status(done.returncode)
    channel.close()


@contextmanager
def serving(host: Host) -> Iterator[Host]:
    open_ones: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        host.port = server.getsockname()[1]

        def accept() -> None:
            while True:
                try:
                    transport = paramiko.Transport(server.accept()[0])
                    open_ones.append(transport)
                    transport.add_server_key(host.host_key)
                    transport.start_server(server=_Session(host))
                except (OSError, EOFError, paramiko.SSHException):
                    if server.fileno() < 0:
                        return

        threading.Thread(target=accept, daemon=True).start()
        yield host
    for transport in open_ones:
        transport.close()
