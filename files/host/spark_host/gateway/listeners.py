"""Planned and actual listen addresses of a gateway.

Addresses of bridges and tunnels appear late and change. Missing addresses are skipped, because
nginx would not start with them.
"""

import fcntl
import json
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spark_contract.gateway import Gateway
from spark_contract.paths import Paths

from spark_host.system.programs import error_line, run_program

_BRIDGE = "docker0"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
_LISTEN = "0A"  # TCP_LISTEN of linux/tcp_states.h
_TAILSCALE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Listener:
    address: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Listeners:
    listeners: tuple[Listener, ...]
    missing: str | None


def planned_listeners(settings: Gateway) -> Listeners:
    """Return the listeners of a gateway; loopback addresses always use plain HTTP.

    With IPv6, a gateway also listens on ::1, where another local user could otherwise receive keys.
    """
    port, tls, missing = settings.port, False, None
    has_ipv6 = _is_local("::1")
    addresses: list[str | None] = []
    if settings.expose == "docker":
        addresses.append(_bridge_address())
        if addresses[0] is None:
            missing = f"{_BRIDGE} has no address; check that docker is running"
    elif settings.expose == "tailscale":
        address, missing = tailscale_address()
        addresses.append(address)
    elif settings.expose == "lan":
        tls = settings.tls is not None
        addresses += ["0.0.0.0", "::"] if has_ipv6 else ["0.0.0.0"]
    loopback = ["127.0.0.1", "::1"] if has_ipv6 else ["127.0.0.1"]
    listeners = [Listener(address, port, tls=False) for address in loopback]
    listeners += [Listener(address, port, tls) for address in addresses if address]
    return Listeners(tuple(listeners), missing)


def listening_addresses(pid: int, port: int) -> frozenset[str]:
    """Return the addresses at which a process listens on ``port``."""
    files = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            files.add(os.readlink(entry.path))
    addresses = set()
    # /proc/net/tcp6 does not exist if IPv6 is disabled.
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            _, local, _, state, *_, inode = line.split()[:10]
            address, _, hex_port = local.partition(":")
            if state == _LISTEN and int(hex_port, 16) == port and f"socket:[{inode}]" in files:
                addresses.add(_parse_address(address))
    return frozenset(addresses)


def tailscale_address() -> tuple[str | None, str | None]:
    """Return this host's tailnet address and ``None``, or ``None`` and why it has no address."""
    result = run_program(["tailscale", "ip", "-4"], _TAILSCALE_TIMEOUT_S)
    lines = result.stdout.split()
    if result.returncode != 0 or not lines:
        reason = error_line(result) if result.returncode else "the host has no address"
        return None, f"tailscale is not up: {reason}"
    if not _is_local(lines[0]):
        return None, f"no interface of this host has the tailscale address {lines[0]}"
    return lines[0], None


def replica_addresses(settings: Gateway, paths: Paths) -> dict[str, str]:
    """Return address:port of other replicas by name; an unresolvable name keeps its last address.

    The watchdog cannot use the network, and after a power cut other hosts may start later.
    """
    others = settings.replicas.others if settings.replicas else ()
    path = known_replicas(settings, paths)
    known = json.loads(path.read_text()) if path.exists() else {}
    # On a tailnet, gateways listen only on IPv4.
    family = socket.AF_INET if settings.expose == "tailscale" else socket.AF_UNSPEC
    addresses = {name: _resolve(name, family) or known.get(name) for name in others}
    return {name: address for name, address in addresses.items() if address}


def known_replicas(settings: Gateway, paths: Paths) -> Path:
    return paths.gateway_bodies(settings.service) / "replicas.json"


def _resolve(name: str, family: int) -> str | None:
    host, _, port = name.rpartition(":")
    try:
        results = socket.getaddrinfo(host.strip("[]"), None, family, socket.SOCK_STREAM)
    except OSError:
        return None
    family, *_, address = results[0]
    return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"


def _bridge_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            answer = fcntl.ioctl(query, _GET_ADDRESS, struct.pack("256s", _BRIDGE.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])  # sin_addr of struct ifreq


def _is_local(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _parse_address(text: str) -> str:
    """Parse an address of /proc/net/tcp or tcp6, which contain 32-bit words in host byte order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
