"""Netplan files of cabled ports, and which links between hosts are measured."""

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
# systemd names: the PCI domain unless it is 0, then the slot.
_NAME = re.compile(r"en(?:P(\d+))?p(.*)")


def fabric_plan(host: str, settings: Settings, found: Ports) -> FabricPlan:
    """Return the network configuration that a host tries.

    Raises:
        PlanError: the host is not in the fabric, or its ports do not match the settings.
    """
    fabric = settings.fabric
    hosts = fabric.hosts or settings.cluster.hosts
    if host not in hosts:
        fix = "add it to fabric.hosts or cluster.hosts"
        raise PlanError.one(f"{host}: fabric", "is not in the fabric", fix)
    ports = _chosen(host, settings, found)
    planned = tuple(
        FabricPort(port.interface, fabric.address(hosts.index(host), network), fabric.mtu)
        for port, network in zip(ports, fabric.networks, strict=True)
    )
    if problems := [problem for port in planned for problem in _conflicts(host, port, found)]:
        raise PlanError(problems)
    return FabricPlan(netplan_of(planned), planned, fabric.confirm_s)


def there_already(host: str, settings: Settings, found: Ports) -> str:
    """Return the addresses of the ports if each has one, otherwise an empty string."""
    ports = _chosen(host, settings, found)
    if not all(port.addresses for port in ports):
        return ""
    return ", ".join(f"{port.interface} {' '.join(port.addresses)}" for port in ports)


def netplan_of(ports: Sequence[FabricPort]) -> str:
    """Return netplan's file: fixed addresses, and no waiting for cables at boot."""
    return _HEAD + "".join(_PORT.format(**dataclasses.asdict(port)) for port in ports)


def _chosen(host: str, settings: Settings, found: Ports) -> list[Port]:
    fabric, known = settings.fabric, {port.interface: port for port in found.ports}
    if fabric.interfaces:
        missing = [name for name in fabric.interfaces if name not in known]
        if missing:
            what = f"{', '.join(missing)}: no such interface (found: {', '.join(known) or 'none'})"
            raise PlanError.one(f"{host}: fabric.interfaces", what, "look at `ip link` there")
        return [known[name] for name in fabric.interfaces]
    cabled = sorted((port for port in found.ports if port.device and port.up), key=_place)
    if len(cabled) != len(fabric.networks):
        names = ", ".join(port.interface for port in cabled) or "none"
        what = f"{len(cabled)} ports with RDMA and a cable ({names})"
        what += f" for {len(fabric.networks)} networks"
        fix = "cable one cage, or set fabric.interfaces and fabric.networks"
        raise PlanError.one(f"{host}: fabric", what, fix)
    return cabled


def _place(port: Port) -> tuple[int, str]:
    """Return the sort key of a port: the same slot on each host, by PCI domain."""
    match = _NAME.match(port.interface)
    return (int(match[1] or 0), match[2]) if match else (0, port.interface)


def _conflicts(host: str, planned: FabricPort, found: Ports) -> Iterator[Problem]:
    """Yield addresses of the port, or uses of its network, that conflict with the plan."""
    network = ipaddress.IPv4Interface(planned.address).network
    present = [(port.interface, text) for port in found.ports for text in port.addresses]
    for interface, text in present:
        if interface == planned.interface and text != planned.address:
            what = f"already has {text}; {NETPLAN_FILE} would add a second address"
            fix = "configure its twin port in the file that sets this address, or remove it there"
            yield Problem(f"{host}: {interface}", what, fix)
        elif interface != planned.interface and network.overlaps(
            ipaddress.IPv4Interface(text).network
        ):
            what = f"{network} is already used by {interface} ({text})"
            yield Problem(f"{host}: {planned.interface}", what, "set fabric.networks to free ones")


def rails(host: str, settings: Settings, found: Mapping[str, Ports]) -> tuple[Way, ...]:
    """Return the routes to the next host: over RDMA ports, or over those in the settings.

    Raises:
        PlanError: the host is not in the fabric, or shares no network with the next.
    """
    hosts = settings.fabric.hosts or settings.cluster.hosts
    if host not in hosts or len(hosts) < 2:
        fix = "list at least two hosts in fabric.hosts or cluster.hosts, including this one"
        raise PlanError.one(f"{host}: fabric", "is not in a fabric of several hosts", fix)
    other = hosts[(hosts.index(host) + 1) % len(hosts)]
    ways = tuple(_ways(_chosen_rails(found[host].ports, settings), other, found[other].ports))
    if not ways:
        what = f"no cabled port shares a network with {other}"
        raise PlanError.one(f"{host}: fabric", what, "run `spark-deploy fabric` to set addresses")
    return ways


def _chosen_rails(ports: Sequence[Port], settings: Settings) -> list[Port]:
    named, subnet = settings.fabric.interfaces, settings.cluster.subnet
    up = [port for port in ports if port.up]
    if named:
        return [port for port in up if port.interface in named]
    if subnet:
        network = ipaddress.IPv4Network(subnet)
        return [port for port in up if any(own.network == network for own in _own(port))]
    return [port for port in up if port.device]


def _ways(own: Sequence[Port], other: str, theirs: Sequence[Port]) -> Iterator[Way]:
    # RDMA ports pair with RDMA ports only, even if all ports share one network.
    for port in own:
        networks = {address.network for address in _own(port)}
        for there in (p for p in theirs if p.up and bool(p.device) == bool(port.device)):
            common = [address for address in _own(there) if address.network in networks]
            for address in common[:1]:
                yield Way(
                    port.interface, port.device, port.mtu, _slower(port, there),
                    other, str(address.ip), there.mtu,
                )  # fmt: skip


def _own(port: Port) -> list[ipaddress.IPv4Interface]:
    return [ipaddress.IPv4Interface(text) for text in port.addresses]


def _slower(*ports: Port) -> int | None:
    return min((port.speed_mbit_per_s for port in ports if port.speed_mbit_per_s), default=None)
