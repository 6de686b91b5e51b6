"""Clusters: links between members, the release of all ranks, and rollout waves. Pure.

The engine's own executor for several nodes is used, one rank per host. Every member gets the same
release and finds itself in it by address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spark_contract.release import Cluster, Member, Release

from spark_deploy.config.documents import digest_of
from spark_deploy.config.errors import PlanError, Problem
from spark_deploy.config.settings.service import RolloutSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.engine_arguments import rank_arguments, rank_environment
from spark_deploy.plan.types import Port, Ports, Way

# Arguments of `docker run`: RDMA pins memory, and the engine has no root rights for that.
_PINNED = "--ulimit=memlock=-1:-1"
_RDMA = "--device=/dev/infiniband"
# Each release has two of these ports on the fabric, so members of different releases never meet.
_FIRST_PORT = 29500
_PORTS = 2000


@dataclass(frozen=True, slots=True)
class Link:
    host: str
    address: str
    interface: str
    devices: tuple[str, ...]  # RDMA; empty: TCP
    gid_index: int | None


def links(settings: Settings, ports: Mapping[str, Ports]) -> tuple[Link, ...]:
    """Return how the members reach each other, by rank.

    ``ports`` are those of each host; if empty, addresses stay placeholders.

    Raises:
        PlanError: a member has no address in a common network.
    """
    hosts = settings.cluster.hosts
    if not ports:
        return tuple(Link(host, f"ADDRESS-OF-{host}", "INTERFACE", (), None) for host in hosts)
    network = _network(settings, ports)
    if problems := list(_ambiguous(hosts, ports, network)):
        raise PlanError(problems)
    return tuple(_link(host, ports[host].ports, network) for host in hosts)


def _ambiguous(
    hosts: Sequence[str], found: Mapping[str, Ports], network: ipaddress.IPv4Network
) -> Iterator[Problem]:
    """Yield addresses used twice, and networks on two cables of a host: packets would go astray."""
    owners: dict[str, str] = {}
    for host in hosts:
        ports = _way_ports(found[host].ports, network)
        for address in (text.partition("/")[0] for port in ports for text in port.addresses):
            if (other := owners.setdefault(address, host)) != host:
                what = f"has {address}, like {other}"
                fix = "list each machine once in cluster.hosts; use each address on one port only"
                yield Problem(f"{host}: cluster", what, fix)
        first_ports: dict[ipaddress.IPv4Network, Port] = {}
        for port in (p for p in found[host].ports if p.up and p.addresses):
            first = first_ports.setdefault(_net(port), port)
            if first is not port and (first.device or port.device):
                what = f"{_net(port)} is also the network of {first.interface}: ambiguous routes"
                fix = "give each cabled port a separate network (netplan)"
                yield Problem(f"{host}: {port.interface}", what, fix)


def _network(settings: Settings, found: Mapping[str, Ports]) -> ipaddress.IPv4Network:
    cluster = settings.cluster
    if cluster.subnet:
        network = ipaddress.IPv4Network(cluster.subnet)
        missing = [h for h in cluster.hosts if not any(_of(found[h].ports, network))]
    else:
        networks = [{_net(p) for p in found[h].ports if p.device and p.up and p.addresses}
                    for h in cluster.hosts]  # fmt: skip
        common = set.intersection(*networks)
        if common:
            return min(common)
        network, missing = None, [h for h, own in zip(cluster.hosts, networks, strict=True)
                                  if not own] or list(cluster.hosts)  # fmt: skip
    if network is not None and not missing:
        return network
    raise PlanError([_unreachable(host, found[host].ports, cluster.subnet) for host in missing])


def _unreachable(host: str, ports: Sequence[Port], subnet: str | None) -> Problem:
    seen = [
        f"{port.interface}{f' ({port.device})' if port.device else ''} "
        f"{'up' if port.up else 'down'} {', '.join(port.addresses) or 'without address'}"
        for port in ports
    ]
    required = f"in {subnet}" if subnet else "on an RDMA port in a network of all members"
    return Problem(
        f"{host}: cluster",
        f"has no address {required} (found: {'; '.join(seen) or 'no interface'})",
        "give the cabled port an address (netplan), or set cluster.subnet to another network",
    )


def _link(host: str, ports: Sequence[Port], network: ipaddress.IPv4Network) -> Link:
    main = next(_of(ports, network))
    # Both twins of a cage carry half of the cable; NCCL has one GID index for all devices.
    twins = [port for port in ports if port.device and port.up and port.addresses]
    same = [port for port in twins if main.device and port.gid_index == main.gid_index]
    return Link(
        host=host,
        address=_address(main, network),
        interface=main.interface,
        devices=tuple(sorted(port.device for port in same if port.device)),
        gid_index=main.gid_index,
    )


def _of(ports: Sequence[Port], network: ipaddress.IPv4Network) -> Iterator[Port]:
    return (port for port in ports if port.up and _address(port, network))


def _address(port: Port, network: ipaddress.IPv4Network) -> str:
    addresses = (text.partition("/")[0] for text in port.addresses)
    return next((text for text in addresses if ipaddress.IPv4Address(text) in network), "")


def _net(port: Port) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Interface(port.addresses[0]).network


def ways(settings: Settings, host: str, found: Mapping[str, Ports]) -> tuple[Way, ...]:
    """Return every route from a host to the other members, over all interfaces with RDMA."""
    if not found:
        return ()
    network = _network(settings, found)
    return tuple(
        Way(
            own.interface, own.device, own.mtu, own.speed_mbit_per_s,
            member, other.addresses[0].partition("/")[0], other.mtu,
        )
        for own in _way_ports(found[host].ports, network)
        for member in settings.cluster.hosts
        if member != host
        for other in _way_ports(found[member].ports, network)
        if _net(other) == _net(own)
    )  # fmt: skip


def _way_ports(ports: Sequence[Port], network: ipaddress.IPv4Network) -> list[Port]:
    return [
        port
        for port in ports
        if port.up and port.addresses and (port.device or _address(port, network))
    ]


def spread(release: Release, settings: Settings, found: Mapping[str, Ports]) -> Release:
    """Return the release for all members of the host's cluster.

    Its port follows from the rest of the release.
    """
    joined = links(settings, found)
    offset = int(digest_of({"release": release, "links": joined})[:8], 16) % (_PORTS // 2)
    port = _FIRST_PORT + 2 * offset
    members = tuple(_member(link, rank, port, joined) for rank, link in enumerate(joined))
    # Host network: ranks exchange further ports only while they run.
    arguments = ("--network=host" if word == "--network=none" else word
                 for word in release.engine.docker_args)  # fmt: skip
    return replace(
        release,
        engine=replace(release.engine, docker_args=tuple(arguments)),
        cluster=Cluster(members, port, settings.cluster.join_s),
    )


def _member(link: Link, rank: int, port: int, joined: Sequence[Link]) -> Member:
    return Member(
        host=link.host,
        address=link.address,
        argv=rank_arguments(rank, [member.address for member in joined], port),
        env=_environment(link),
        docker_args=(_PINNED, _RDMA) if link.devices else (),
    )


def _environment(link: Link) -> dict[str, str]:
    """Return the variables with which a rank's libraries use only the fabric."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_NET_DEVICES")
    variables = {name: link.interface for name in names} | rank_environment(link.address)
    if not link.devices:
        return {**variables, "NCCL_IB_DISABLE": "1"}
    variables |= {
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": ",".join(link.devices),
        "NCCL_IGNORE_CPU_AFFINITY": "1",
    }
    if link.gid_index is not None:
        variables["NCCL_IB_GID_INDEX"] = str(link.gid_index)
    return variables


Wave = tuple[str, ...]


def waves_of(
    rollouts: Mapping[str, RolloutSettings], clusters: Iterable[Wave] = ()
) -> tuple[Wave, ...]:
    """Return which hosts change together, wave after wave.

    Canaries come first, one per wave; then the other hosts in order. The smallest ``at_once`` of
    the hosts limits a wave. The members of a cluster are one wave: they can only change together.

    Args:
        rollouts: settings of every host, in inventory order.
        clusters: members of each cluster.
    """
    unique = [wave for wave in dict.fromkeys(clusters) if wave]
    members = {name for wave in unique for name in wave}
    waves = _single_waves({n: rollout for n, rollout in rollouts.items() if n not in members})
    canaries = {rollout.canary for rollout in rollouts.values()}
    for wave in unique:
        waves.insert(0 if canaries.intersection(wave) else len(waves), wave)
    return tuple(waves)


def _single_waves(rollouts: Mapping[str, RolloutSettings]) -> list[Wave]:
    canaries = [name for name in rollouts if any(r.canary == name for r in rollouts.values())]
    waves: list[Wave] = [(name,) for name in canaries]
    wave: Wave = ()
    for name in rollouts:
        if name in canaries:
            continue
        limits = [rollouts[member].at_once for member in (*wave, name)]
        if wave and len(wave) >= min(len(rollouts) if n == "all" else n for n in limits):
            waves.append(wave)
            wave = ()
        wave = (*wave, name)
    return [*waves, wave] if wave else waves
