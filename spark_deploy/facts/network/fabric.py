"""The network between hosts of a cluster: ports, addresses, RDMA devices and their GIDs.

One cage of a Spark's ConnectX-7 shows two interfaces, each with an RDMA device of its own; which
of the four names carries the cable differs from host to host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spark_deploy.facts.reading import HostFact
from spark_deploy.facts.sections import Sections, script, whole

_SCRIPT = r"""
echo '== addresses'; ip addr show
echo '== speeds'
for n in /sys/class/net/*; do
  speed=$(cat "$n/speed" 2>/dev/null) && echo "${n##*/} Speed: ${speed}Mb/s"
done
echo '== rdma'
for d in /sys/class/infiniband/*; do
  for n in "$d"/device/net/*; do
    [ -e "$n" ] || continue
    up=Down; grep -q ACTIVE "$d/ports/1/state" 2>/dev/null && up=Up
    echo "${d##*/} port 1 ==> ${n##*/} ($up)"
  done
done
echo '== gids'
for t in /sys/class/infiniband/*/ports/1/gid_attrs/types/*; do
  grep -q 'RoCE v2' "$t" 2>/dev/null || continue
  d=${t%/gid_attrs/*}
  echo "$(basename "${d%/ports/1}") ${t##*/} $(cat "$d/gids/${t##*/}")"
done
"""
_INTERFACE = re.compile(r"\d+: ([^:@]+)(?:@\S+)?: <([^>]*)> mtu (\d+)")
_ADDRESS = re.compile(r"\s+inet ([0-9.]+/\d+) ")
_RDMA = re.compile(r"(\S+) port \d+ ==> (\S+) \((\w+)\)")
_SPEED = re.compile(r"(\S+) Speed: (\d+)Mb/s")
_MAPPED = "0000:0000:0000:0000:0000:ffff:"  # how a GID holds an IPv4 address


@dataclass(frozen=True, slots=True)
class Port:
    """One interface, and the RDMA device behind it."""

    interface: str
    up: bool  # a cable is in it, and the other end is on
    mtu: int
    speed_mbit_per_s: int | None
    addresses: tuple[str, ...]  # IPv4, with the length of the network: 192.168.100.10/24
    device: str | None
    gid_index: int | None  # of RoCE version 2 with the first address


@dataclass(frozen=True, slots=True)
class Ports:
    """What a host has to reach others by."""

    ports: tuple[Port, ...]


class Fabric(HostFact[Ports]):
    """Every interface of a host but its loopback."""

    def command(self) -> str:
        """Return the script."""
        return script(_SCRIPT)

    def process(self, output: Iterable[str]) -> Ports:
        """Read the sections."""
        sections = whole(output)
        devices = _devices(sections)
        speeds = {m[1]: int(m[2]) for m in map(_SPEED.match, sections.get("speeds", ())) if m}
        gids = [line.split() for line in sections.get("gids", ())]
        found = []
        for name, up, mtu, addresses in _interfaces(sections):
            device = devices.get(name)
            found.append(
                Port(
                    interface=name,
                    up=up,
                    mtu=mtu,
                    speed_mbit_per_s=speeds.get(name),
                    addresses=addresses,
                    device=device,
                    gid_index=_gid_index(gids, device, addresses),
                )
            )
        return Ports(tuple(found))


def _interfaces(sections: Sections) -> Iterator[tuple[str, bool, int, tuple[str, ...]]]:
    """Yield name, link, MTU and addresses of each interface in the words of `ip addr`."""
    found: list[tuple[re.Match[str], list[str]]] = []
    for line in sections.get("addresses", ()):
        if start := _INTERFACE.match(line):
            found.append((start, []))
        elif (address := _ADDRESS.match(line)) and found:
            found[-1][1].append(address[1])
    for start, addresses in found:
        if "LOOPBACK" not in start[2]:
            yield start[1], "LOWER_UP" in start[2], int(start[3]), tuple(addresses)


def _devices(sections: Sections) -> dict[str, str]:
    """Return the RDMA device of each interface whose port is up."""
    lines = map(_RDMA.match, sections.get("rdma", ()))
    return {line[2]: line[1] for line in lines if line and line[3] == "Up"}


def _gid_index(gids: list[list[str]], device: str | None, addresses: tuple[str, ...]) -> int | None:
    for own, index, gid in (words for words in gids if len(words) == 3):
        if own == device and addresses and gid == _gid_of(addresses[0]):
            return int(index)
    return None


def _gid_of(address: str) -> str:
    a, b, c, d = map(int, address.partition("/")[0].split("."))
    return f"{_MAPPED}{a:02x}{b:02x}:{c:02x}{d:02x}"
