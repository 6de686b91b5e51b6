"""The addresses a gateway shall listen on, and those it does listen on.

Addresses of a bridge or a tunnel come late and may change, so they are asked for on the host each
time, and one that is not there is left out: nginx refuses to start for an address it cannot bind.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
from dataclasses import dataclass

from spark_contract.gateway import Gateway

_BRIDGE = "docker0"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
_LISTEN = "0A"  # TCP_LISTEN of linux/tcp_states.h


@dataclass(frozen=True, slots=True)
class Listener:
    """One address of the gateway."""

    address: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else (
            f"{self.address}:{self.port}"
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Listeners:
    """What the settings ask for: the listeners possible now, and why some are missing."""

    listeners: tuple[Listener, ...]
    missing: str | None


def wanted(settings: Gateway) -> Listeners:
    """Work out the listeners of a gateway; this host itself always gets plain HTTP.

    The loopback addresses are listeners of their own in every exposure, so that they stay open
    while others come and go, and none is left to a user of the host who would be sent keys: what
    asks for localhost often asks ::1 first.
    """
    port = settings.port
    six = _is_ours("::1")
    found = [Listener("127.0.0.1", port, False)] + [Listener("::1", port, False)] * six
    missing = None
    if settings.expose == "docker":
        address = _bridge_address()
        missing = None if address else f"{_BRIDGE} has no address; is docker running?"
        found += [Listener(address, port, False)] if address else []
    elif settings.expose == "tailscale":
        address, missing = tailscale_address()
        found += [Listener(address, port, False)] if address else []
    elif settings.expose == "lan":
        tls = settings.tls is not None
        found.append(Listener("0.0.0.0", port, tls))
        found += [Listener("::", port, tls)] if six else []
    return Listeners(tuple(found), missing)


def listening(pid: int, port: int) -> frozenset[str]:
    """Return the addresses on which a process listens on ``port``."""
    mine = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            mine.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as source:
                lines = source.read().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:
            words = line.split()
            address, _, number = words[1].partition(":")
            if words[3] == _LISTEN and int(number, 16) == port and words[9] in mine:
                found.add(_address(address))
    return frozenset(found)


def tailscale_address() -> tuple[str | None, str | None]:
    """Return this host's address in its tailnet, else why there is none."""
    try:
        said = subprocess.run(
            ["tailscale", "ip", "-4"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"tailscale cannot be asked ({type(error).__name__})"
    lines = said.stdout.split()
    if said.returncode != 0 or not lines:
        why = (said.stderr.strip().splitlines() or ["it has no address"])[-1]
        return None, f"tailscale is not up: {why}"
    if not _is_ours(lines[0]):
        return None, f"tailscale's address {lines[0]} is on no interface of this host"
    return lines[0], None


def _bridge_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answer = fcntl.ioctl(asker, _GET_ADDRESS, struct.pack("256s", _BRIDGE.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _is_ours(address: str) -> bool:
    """Return whether an interface of this host has the address now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _address(text: str) -> str:
    """Read an address of /proc/net/tcp*: words of 32 bits in the machine's byte order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
