"""In which waves a change goes over hosts. Pure."""

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

# Only the engine's own means are used: its executor for several nodes, one rank a host. Every
# member gets the same release, in which it finds itself by its address.


# Of `docker run`: RDMA pins the memory it moves. The engine keeps no right of root for that.
_PINNED = "--ulimit=memlock=-1:-1"
_RDMA = "--device=/dev/infiniband"
# Each release has two of these ports on the fabric, so members of different releases never meet.
_FIRST_PORT = 29500
_PORTS = 2000


@dataclass(frozen=True, slots=True)
class Link:
    """How one member reaches the others."""

    host: str
    address: str
    interface: str
    devices: tuple[str, ...]  # RDMA; none: plain TCP
    gid_index: int | None


def links(settings: Settings, found: Mapping[str, Ports]) -> tuple[Link, ...]:
    """Return how the members reach each other, by rank.

    ``found`` is what the hosts said; without a word of them the addresses are left open.

    Raises:
        PlanError: a member has no address in a network of all.
    """
    hosts = settings.cluster.hosts
    if not found:
        return tuple(Link(host, f"ADDRESS-OF-{host}", "INTERFACE", (), None) for host in hosts)
    network = _network(settings, found)
    if problems := list(_ambiguous(hosts, found, network)):
        raise PlanError(problems)
    return tuple(_link(host, found[host].ports, network) for host in hosts)


def _ambiguous(
    hosts: Sequence[str], found: Mapping[str, Ports], network: ipaddress.IPv4Network
) -> Iterator[Problem]:
    """Yield what has packets arrive elsewhere: an address twice, or a cable's network twice."""
    owners: dict[str, str] = {}
    for host in hosts:
        ports = _way_ports(found[host].ports, network)
        for address in (text.partition("/")[0] for port in ports for text in port.addresses):
            if (other := owners.setdefault(address, host)) != host:
                what = f"has {address}, as {other} has"
                fix = "name each machine once in cluster.hosts, and give each address to one port"
                yield Problem(f"{host}: cluster", what, fix)
        seen: dict[ipaddress.IPv4Network, Port] = {}
        for port in (one for one in found[host].ports if one.up and one.addresses):
            first = seen.setdefault(_net(port), port)
            if first is not port and (first.device or port.device):
                what = (
                    f"{_net(port)} is the network of {first.interface} as well: packets take either"
                )
                fix = "give each cabled port a network of its own (netplan)"
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
    wanted = f"in {subnet}" if subnet else "on a port with RDMA that all members share a network by"
    return Problem(
        f"{host}: cluster",
        f"has no address {wanted} (found: {'; '.join(seen) or 'no interface'})",
        "give the cabled port an address (netplan), or name another network by cluster.subnet",
    )


def _link(host: str, ports: Sequence[Port], network: ipaddress.IPv4Network) -> Link:
    main = next(_of(ports, network))
    # Both twins of a cage carry half of the cable each; one with another GID index would need
    # a variable of its own, which there is not.
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
    plain = (one.partition("/")[0] for one in port.addresses)
    return next((one for one in plain if ipaddress.IPv4Address(one) in network), "")


def _net(port: Port) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Interface(port.addresses[0]).network


def ways(settings: Settings, host: str, found: Mapping[str, Ports]) -> tuple[Way, ...]:
    """Return every way from a host to the others: by all interfaces that have RDMA."""
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
    """Return the release of a host as that of all members of its cluster.

    Its ports follow from everything else in it.
    """
    joined = links(settings, found)
    offset = int(digest_of({"release": release, "links": joined})[:8], 16) % (_PORTS // 2)
    port = _FIRST_PORT + 2 * offset
    members = tuple(_member(link, rank, port, joined) for rank, link in enumerate(joined))
    # On the network of the host, because ranks are told each other's ports only as they run.
    arguments = ("--network=host" if one == "--network=none" else one
                 for one in release.engine.docker_args)  # fmt: skip
    return replace(
        release,
        engine=replace(release.engine, docker_args=tuple(arguments)),
        cluster=Cluster(members, port, settings.cluster.join_s),
    )


def _member(link: Link, rank: int, port: int, joined: Sequence[Link]) -> Member:
    return Member(
        host=link.host,
        address=link.address,
        argv=rank_arguments(rank, [one.address for one in joined], port),
        env=_environment(link),
        docker_args=(_PINNED, _RDMA) if link.devices else (),
    )


def _environment(link: Link) -> dict[str, str]:
    """Return what the libraries of a rank need to take the fabric and nothing else."""
    named = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_NET_DEVICES")
    found = {name: link.interface for name in named} | rank_environment(link.address)
    if not link.devices:
        return {**found, "NCCL_IB_DISABLE": "1"}
    found |= {
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": ",".join(link.devices),
        "NCCL_IGNORE_CPU_AFFINITY": "1",
    }
    if link.gid_index is not None:
        found["NCCL_IB_GID_INDEX"] = str(link.gid_index)
    return found


Wave = tuple[str, ...]


def waves_of(
    rollouts: Mapping[str, RolloutSettings], clusters: Iterable[Wave] = ()
) -> tuple[Wave, ...]:
    """Return which hosts change together, wave after wave.

    Canaries come first, each alone; then the others in their order. A wave is as large as the most
    careful host in it allows. The members of a cluster are one wave: they can only change together.

    Args:
        rollouts: settings of every host, in the order of the inventory.
        clusters: hosts that serve one model together.
    """
    together = [wave for wave in dict.fromkeys(clusters) if wave]
    alone = {n: one for n, one in rollouts.items() if not any(n in wave for wave in together)}
    found = list(_waves_alone(alone))
    for wave in together:
        first = any(one.canary in wave for one in rollouts.values())
        found.insert(0 if first else len(found), wave)
    return tuple(found)


def _waves_alone(rollouts: Mapping[str, RolloutSettings]) -> tuple[Wave, ...]:
    canaries = [name for name in rollouts if any(one.canary == name for one in rollouts.values())]
    waves: list[Wave] = [(name,) for name in canaries]
    wave: Wave = ()
    for name in rollouts:
        if name in canaries:
            continue
        limits = [rollouts[member].at_once for member in (*wave, name)]
        if wave and len(wave) >= min(len(rollouts) if one == "all" else one for one in limits):
            waves.append(wave)
            wave = ()
        wave = (*wave, name)
    return (*waves, wave) if wave else tuple(waves)
