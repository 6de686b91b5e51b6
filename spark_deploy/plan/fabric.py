"""Which ways between hosts are measured: each cabled port, to the next host in their order."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence

from spark_contract.fabric import NETPLAN_FILE, FabricPlan, FabricPort

from spark_deploy.config.errors import PlanError, Problem
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.types import Port, Ports, Way

_HEAD = """\
# Written by `spark-deploy fabric`; `spark-deploy fabric --restore` takes it back.
network:
  version: 2
  ethernets:
"""
_PORT = """\
    {interface}:
      addresses: [{address}]
      mtu: {mtu}
      dhcp4: false
      dhcp6: false
      link-local: []
      optional: true
"""
# As systemd names them: the PCI domain, where it is not 0, then the place.
_NAME = re.compile(r"en(?:P(\d+))?p(.*)")


def fabric_plan(host: str, settings: Settings, found: Ports) -> FabricPlan:
    """Return what a host is to try.

    Raises:
        PlanError: the host is none of those on the cables, or its ports are not what was named.
    """
    fabric = settings.fabric
    hosts = fabric.hosts or settings.cluster.hosts
    if host not in hosts:
        fix = "name it in fabric.hosts, or in cluster.hosts"
        raise PlanError.one(f"{host}: fabric", "is no host on the cables", fix)
    ports = _chosen(host, settings, found)
    planned = tuple(
        FabricPort(port.interface, fabric.address(hosts.index(host), network), fabric.mtu)
        for port, network in zip(ports, fabric.networks, strict=True)
    )
    if problems := [one for port in planned for one in _taken(host, port, found)]:
        raise PlanError(problems)
    return FabricPlan(netplan_of(planned), planned, fabric.confirm_s)


def there_already(host: str, settings: Settings, found: Ports) -> str:
    """Return what the ports have, where every one has an address; else nothing."""
    ports = _chosen(host, settings, found)
    if not all(port.addresses for port in ports):
        return ""
    return ", ".join(f"{port.interface} {' '.join(port.addresses)}" for port in ports)


def netplan_of(ports: Sequence[FabricPort]) -> str:
    """Return netplan's file: fixed addresses, and a boot that waits for no cable."""
    return _HEAD + "".join(_PORT.format(**dataclasses.asdict(port)) for port in ports)


def _chosen(host: str, settings: Settings, found: Ports) -> list[Port]:
    """Return the ports in the order of the networks."""
    fabric, known = settings.fabric, {port.interface: port for port in found.ports}
    if fabric.interfaces:
        missing = [name for name in fabric.interfaces if name not in known]
        if missing:
            what = f"{', '.join(missing)}: no such interface (found: {', '.join(known) or 'none'})"
            raise PlanError.one(f"{host}: fabric.interfaces", what, "look at `ip link` there")
        return [known[name] for name in fabric.interfaces]
    cabled = sorted((port for port in found.ports if port.device and port.up), key=_place)
    if len(cabled) != len(fabric.networks):
        named = ", ".join(port.interface for port in cabled) or "none"
        what = f"{len(cabled)} ports with RDMA and a cable ({named})"
        what += f" for {len(fabric.networks)} networks"
        fix = "cable one cage, or name ports and networks by fabric.interfaces and fabric.networks"
        raise PlanError.one(f"{host}: fabric", what, fix)
    return cabled


def _place(port: Port) -> tuple[int, str]:
    """Return where a port stands: twins at the same place of each host, by PCI domain."""
    match = _NAME.match(port.interface)
    return (int(match[1] or 0), match[2]) if match else (0, port.interface)


def _taken(host: str, planned: FabricPort, found: Ports) -> Iterator[Problem]:
    """Yield what already has a port, or the network that it is to get."""
    mine = ipaddress.IPv4Interface(planned.address).network
    there = [(port.interface, text) for port in found.ports for text in port.addresses]
    for interface, text in there:
        if interface == planned.interface and text != planned.address:
            what = f"already has {text}, which {NETPLAN_FILE} would add to"
            fix = "give its twin one in the file that gave this; then nothing is missing"
            yield Problem(f"{host}: {interface}", what, fix)
        elif interface != planned.interface and mine.overlaps(
            ipaddress.IPv4Interface(text).network
        ):
            what = f"{mine} is already that of {interface} ({text})"
            yield Problem(f"{host}: {planned.interface}", what, "choose others by fabric.networks")


def rails(host: str, settings: Settings, found: Mapping[str, Ports]) -> tuple[Way, ...]:
    """Return the ways from a host to the next: with RDMA, or those that are named.

    Raises:
        PlanError: the host is none of those on the cables, or shares no network with the next.
    """
    hosts = settings.fabric.hosts or settings.cluster.hosts
    if host not in hosts or len(hosts) < 2:
        fix = "name two hosts or more in fabric.hosts, or in cluster.hosts, it among them"
        raise PlanError.one(f"{host}: fabric", "is not one of several hosts on the cables", fix)
    other = hosts[(hosts.index(host) + 1) % len(hosts)]
    ways = tuple(_ways(_chosen_rails(found[host].ports, settings), other, found[other].ports))
    if not ways:
        what = f"no cabled port shares a network with one of {other}"
        raise PlanError.one(
            f"{host}: fabric", what, "give the ports addresses first: spark-deploy fabric"
        )
    return ways


def _chosen_rails(ports: Sequence[Port], settings: Settings) -> list[Port]:
    named, subnet = settings.fabric.interfaces, settings.cluster.subnet
    up = [port for port in ports if port.up]
    if named:
        return [port for port in up if port.interface in named]
    if subnet:
        network = ipaddress.IPv4Network(subnet)
        return [port for port in up if any(one.network == network for one in _own(port))]
    return [port for port in up if port.device]


def _ways(own: Sequence[Port], other: str, theirs: Sequence[Port]) -> Iterator[Way]:
    # A port with RDMA meets such a port alone: also where the network of hosts is the same one.
    for port in own:
        for there in (one for one in theirs if one.up and bool(one.device) == bool(port.device)):
            networks = {one.network for one in _own(port)}
            met = [one for one in _own(there) if one.network in networks]
            for address in met[:1]:
                yield Way(
                    port.interface, port.device, port.mtu, _slower(port, there),
                    other, str(address.ip), there.mtu,
                )  # fmt: skip


def _own(port: Port) -> list[ipaddress.IPv4Interface]:
    return [ipaddress.IPv4Interface(text) for text in port.addresses]


def _slower(*ports: Port) -> int | None:
    return min((one.speed_mbit_per_s for one in ports if one.speed_mbit_per_s), default=None)
