"""The lab's state directory and addresses."""

import os
from pathlib import Path

from lab.errors import LabError

BRIDGE = "br-lab"
HOST_IP = "10.77.0.1"
PROXY_IP = "10.77.0.2"
APT_PORT, HUB_PORT, CDN_PORT, REGISTRY_PORT = 8081, 8082, 8083, 5000
PROXY_PORT = 3128
USER = "spark"
MAX_GUESTS = 40


class LabPaths:
    def __init__(self, state: Path):
        self.state = state
        self.cache = state / "cache"
        self.guests = state / "guests"
        self.run = state / "run"
        self.apt = state / "apt"
        self.hub = state / "hub"
        self.registry = state / "registry"
        self.ssh_key = state / "id_ed25519"
        self.known_hosts = state / "known_hosts"
        self.record = state / "lab.json"


def lab_paths() -> LabPaths:
    state = Path(os.environ.get("SPARK_LAB_DIR", "/var/lib/spark-lab")).resolve()
    if state.is_relative_to("/tmp"):
        raise LabError("SPARK_LAB_DIR", f"{state} is under /tmp", "set a directory on a disk")
    return LabPaths(state)


def guest_ip(index: int) -> str:
    return f"10.77.0.{10 + index}"


def guest_names(arguments: list[str]) -> list[str]:
    names: list[str] = []
    for argument in arguments:
        count = int(argument) if argument.isdigit() else None
        expanded = [argument] if count is None else [f"lab-{index + 1}" for index in range(count)]
        names += [name for name in expanded if name not in names]
    for name in names:
        guest_index(name)
    return names


def guest_index(name: str) -> int:
    prefix, _, number = name.partition("-")
    if prefix != "lab" or not number.isdigit() or not 1 <= int(number) <= MAX_GUESTS:
        raise LabError(name, "invalid guest name", f"use lab-1 to lab-{MAX_GUESTS}, or a number")
    return int(number)
