"""Which ways between hosts are measured: each cabled port, to the next host in their order."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from spark_deploy.errors import PlanError
from spark_deploy.facts.network.fabric import Port, Ports
from spark_deploy.planning.machine import Way
from spark_deploy.settings.types import Settings


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
    ways = tuple(_ways(_chosen(found[host].ports, settings), other, found[other].ports))
    if not ways:
        what = f"no cabled port shares a network with one of {other}"
        raise PlanError.one(
            f"{host}: fabric", what, "give the ports addresses first: spark-deploy fabric"
        )
    return ways


def _chosen(ports: Sequence[Port], settings: Settings) -> list[Port]:
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
