"""Plan the network between hosts, releases of clusters, and the waves of a rollout."""

import dataclasses
import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spark_contract.release import Cluster, Member, Release
from spark_contract.status import NETPLAN_FILE, FabricPlan, FabricPort

from spark_deploy.config.documents import digest_of
from spark_deploy.config.errors import PlanError, Problem
from spark_deploy.config.settings.service import RolloutSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.engine_arguments import rank_arguments
from spark_deploy.plan.types import FabricLink, Port, Ports

_NETPLAN_HEAD = """\
# Written by `spark-deploy fabric`; `spark-deploy fabric --restore` removes it.
network:
  version: 2
  ethernets:
"""
_NETPLAN_PORT = """\
    {interface}:
      addresses: [{address}]
      mtu: {mtu}
      dhcp4: false
      dhcp6: false
      link-local: []
      optional: true
"""
# systemd names: the PCI domain unless it is 0, then the slot.
_INTERFACE = re.compile(r"en(?:P(\d+))?p(.*)")
# Arguments of `docker run`: RDMA pins memory, and the engine has no root rights for that.
_RDMA_ARGUMENTS = ("--ulimit=memlock=-1:-1", "--device=/dev/infiniband")
# Each release has two of these ports on the fabric, so members of different releases never meet.
_FIRST_PORT = 29500
# Without a new login in this time, the previous network settings are restored.
_CONFIRMATION_TIMEOUT_S = 90
_PORTS = 2000


def fabric_plan(host: str, settings: Settings, host_ports: Ports) -> FabricPlan:
    """Return the network configuration to try on a host.

    Raises PlanError if the host is not in the fabric, or its ports do not match the settings.
    """
    fabric = settings.fabric
    hosts = fabric.hosts or settings.cluster.hosts
    if host not in hosts:
        fix = "add this host to fabric.hosts or cluster.hosts"
        raise PlanError.single(f"{host}: fabric", "is not in the fabric", fix)
    ports = tuple(
        FabricPort(port.interface, fabric.address(hosts.index(host), network), fabric.mtu)
        for port, network in zip(
            _fabric_ports(host, settings, host_ports), fabric.networks, strict=True
        )
    )
    if problems := [problem for port in ports for problem in _conflicts(host, port, host_ports)]:
        raise PlanError(problems)
    return FabricPlan(render_netplan(ports), ports, _CONFIRMATION_TIMEOUT_S)


def existing_addresses(host: str, settings: Settings, host_ports: Ports) -> str:
    ports = _fabric_ports(host, settings, host_ports)
    if not all(port.addresses for port in ports):
        return ""
    return ", ".join(f"{port.interface} {' '.join(port.addresses)}" for port in ports)


def render_netplan(ports: Sequence[FabricPort]) -> str:
    return _NETPLAN_HEAD + "".join(_NETPLAN_PORT.format(**dataclasses.asdict(p)) for p in ports)


def _fabric_ports(host: str, settings: Settings, host_ports: Ports) -> list[Port]:
    """Return the configured ports, or all cabled RDMA ports if none are configured."""
    fabric, by_name = settings.fabric, {port.interface: port for port in host_ports.ports}
    if missing := [name for name in fabric.interfaces if name not in by_name]:
        message = f"{', '.join(missing)}: no such interface (found: {', '.join(by_name) or 'none'})"
        fix = "run `ip link` on that host to list its interfaces"
        raise PlanError.single(f"{host}: fabric.interfaces", message, fix)
    if fabric.interfaces:
        return [by_name[name] for name in fabric.interfaces]
    cabled = sorted((port for port in host_ports.ports if port.device and port.up), key=_slot_key)
    if len(cabled) != len(fabric.networks):
        names = ", ".join(port.interface for port in cabled) or "none"
        message = f"the host has {len(cabled)} cabled RDMA ports ({names}), "
        message += f"but {len(fabric.networks)} networks are configured"
        fix = "connect only one QSFP cage, or set fabric.interfaces and fabric.networks"
        raise PlanError.single(f"{host}: fabric", message, fix)
    return cabled


def _slot_key(port: Port) -> tuple[int, str]:
    match = _INTERFACE.match(port.interface)
    return (int(match[1] or 0), match[2]) if match else (0, port.interface)


def _conflicts(host: str, planned: FabricPort, host_ports: Ports) -> Iterator[Problem]:
    """Yield a problem for each address that conflicts with the planned address."""
    network = ipaddress.IPv4Interface(planned.address).network
    present = [(port.interface, address) for port in host_ports.ports for address in port.addresses]
    for interface, address in present:
        if interface == planned.interface and address != planned.address:
            message = f"this port already has {address}; {NETPLAN_FILE} would add a second address"
            fix = "remove the address, or configure the cable's other port in the file that sets it"
            yield Problem(f"{host}: {interface}", message, fix)
        elif interface != planned.interface and network.overlaps(
            ipaddress.IPv4Interface(address).network
        ):
            message = f"{network} is already used by {interface} ({address})"
            fix = "set fabric.networks to unused networks"
            yield Problem(f"{host}: {planned.interface}", message, fix)


def fabric_links(
    host: str, settings: Settings, fabric: Mapping[str, Ports]
) -> tuple[FabricLink, ...]:
    """Return the links to the next host: over RDMA ports, or over the ports in the settings.

    Raises PlanError if the host is not in the fabric, or shares no network with the next host.
    """
    hosts = settings.fabric.hosts or settings.cluster.hosts
    if host not in hosts or len(hosts) < 2:
        fix = "list at least two hosts in fabric.hosts or cluster.hosts, including this one"
        raise PlanError.single(
            f"{host}: fabric", "this host is not in a fabric of several hosts", fix
        )
    next_host = hosts[(hosts.index(host) + 1) % len(hosts)]
    links = []
    # RDMA ports pair with RDMA ports only, even if all ports share a network.
    for port in fabric[host].ports:
        if not _is_fabric_link(port, settings):
            continue
        networks = {address.network for address in _interfaces(port)}
        for peer in fabric[next_host].ports:
            if not peer.up or bool(peer.device) != bool(port.device):
                continue
            common = [address for address in _interfaces(peer) if address.network in networks]
            speeds = [p.speed_mbit_per_s for p in (port, peer) if p.speed_mbit_per_s]
            if common:
                links.append(FabricLink(
                    port.interface, port.device, port.mtu, min(speeds, default=None),
                    next_host, str(common[0].ip), peer.mtu,
                ))  # fmt: skip
    if not links:
        message = f"no cabled port shares a network with {next_host}"
        fix = "run `spark-deploy fabric` to set addresses"
        raise PlanError.single(f"{host}: fabric", message, fix)
    return tuple(links)


def _is_fabric_link(port: Port, settings: Settings) -> bool:
    """Return whether a port connects hosts: as the settings say, otherwise if it has RDMA."""
    if not port.up:
        return False
    if settings.fabric.interfaces:
        return port.interface in settings.fabric.interfaces
    if settings.cluster.subnet:
        network = ipaddress.IPv4Network(settings.cluster.subnet)
        return any(address.network == network for address in _interfaces(port))
    return bool(port.device)


def _interfaces(port: Port) -> list[ipaddress.IPv4Interface]:
    return [ipaddress.IPv4Interface(text) for text in port.addresses]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and devices at which other members of a cluster reach a host."""

    host: str
    address: str
    interface: str
    devices: tuple[str, ...]  # RDMA; empty: TCP
    gid_index: int | None


def member_endpoints(settings: Settings, ports: Mapping[str, Ports]) -> tuple[Endpoint, ...]:
    """Return the endpoint of each rank; without ``ports``, addresses are placeholders.

    Raises PlanError if a member has no address in a common network.
    """
    hosts = settings.cluster.hosts
    if not ports:
        return tuple(Endpoint(host, f"ADDRESS-OF-{host}", "INTERFACE", (), None) for host in hosts)
    network = _common_network(settings, ports)
    if problems := list(_address_problems(hosts, ports, network)):
        raise PlanError(problems)
    return tuple(_make_endpoint(host, ports[host].ports, network) for host in hosts)


def _address_problems(
    hosts: Sequence[str], fabric: Mapping[str, Ports], network: ipaddress.IPv4Network
) -> Iterator[Problem]:
    """Yield a problem for each address used twice, and for each network on two cables of a host."""
    owners: dict[str, str] = {}
    for host in hosts:
        ports = _cluster_ports(fabric[host].ports, network)
        addresses = [text.partition("/")[0] for port in ports for text in port.addresses]
        for address in addresses:
            if (other := owners.setdefault(address, host)) != host:
                message = f"{address} is also an address of {other}"
                fix = "list each machine once in cluster.hosts; use each address on one port only"
                yield Problem(f"{host}: cluster", message, fix)
        first_ports: dict[ipaddress.IPv4Network, Port] = {}
        for port in fabric[host].ports:
            if not port.up or not port.addresses:
                continue
            subnet = _interfaces(port)[0].network
            first = first_ports.setdefault(subnet, port)
            if first is not port and (first.device or port.device):
                message = f"{first.interface} is also in {subnet}, so routes are ambiguous"
                fix = "give each cabled port a separate network (netplan)"
                yield Problem(f"{host}: {port.interface}", message, fix)


def _common_network(settings: Settings, fabric: Mapping[str, Ports]) -> ipaddress.IPv4Network:
    """Return a network in which every member has an address. Raises PlanError if none exists."""
    cluster = settings.cluster
    if cluster.subnet:
        network = ipaddress.IPv4Network(cluster.subnet)
        missing = [
            host
            for host in cluster.hosts
            if not any(port.up and _address(port, network) for port in fabric[host].ports)
        ]
        if not missing:
            return network
    else:
        networks = {
            host: {
                _interfaces(port)[0].network
                for port in fabric[host].ports
                if port.device and port.up and port.addresses
            }
            for host in cluster.hosts
        }
        if common := set.intersection(*networks.values()):
            return min(common)
        missing = [host for host in cluster.hosts if not networks[host]] or list(cluster.hosts)
    raise PlanError([_missing_address(h, fabric[h].ports, cluster.subnet) for h in missing])


def _missing_address(host: str, ports: Sequence[Port], subnet: str | None) -> Problem:
    interfaces = []
    for port in ports:
        name = f"{port.interface} ({port.device})" if port.device else port.interface
        addresses = ", ".join(port.addresses) or "no address"
        interfaces.append(f"{name} {'up' if port.up else 'down'} {addresses}")
    required = f"in {subnet}" if subnet else "on an RDMA port in a network that all members share"
    return Problem(
        f"{host}: cluster",
        f"this host has no address {required} (found: {'; '.join(interfaces) or 'no interface'})",
        "give the cabled port an address (netplan), or set cluster.subnet to another network",
    )


def _make_endpoint(host: str, ports: Sequence[Port], network: ipaddress.IPv4Network) -> Endpoint:
    main = next(port for port in ports if port.up and _address(port, network))
    # Use all interfaces of a cage: each carries only half of the cable's bandwidth. They must share
    # a GID index, because NCCL uses the same index for all devices.
    rdma_ports = [port for port in ports if port.device and port.up and port.addresses]
    usable = [port for port in rdma_ports if main.device and port.gid_index == main.gid_index]
    return Endpoint(
        host=host,
        address=_address(main, network),
        interface=main.interface,
        devices=tuple(sorted(port.device for port in usable if port.device)),
        gid_index=main.gid_index,
    )


def _address(port: Port, network: ipaddress.IPv4Network) -> str:
    addresses = (text.partition("/")[0] for text in port.addresses)
    return next((text for text in addresses if ipaddress.IPv4Address(text) in network), "")


def member_links(
    settings: Settings, host: str, fabric: Mapping[str, Ports]
) -> tuple[FabricLink, ...]:
    """Return the links from a host to the other members, over each network that they share."""
    if not fabric:
        return ()
    network = _common_network(settings, fabric)
    return tuple(
        FabricLink(
            local.interface, local.device, local.mtu, local.speed_mbit_per_s,
            member, other.addresses[0].partition("/")[0], other.mtu,
        )
        for local in _cluster_ports(fabric[host].ports, network)
        for member in settings.cluster.hosts
        if member != host
        for other in _cluster_ports(fabric[member].ports, network)
        if _interfaces(other)[0].network == _interfaces(local)[0].network
    )  # fmt: skip


def _cluster_ports(ports: Sequence[Port], network: ipaddress.IPv4Network) -> list[Port]:
    return [
        port
        for port in ports
        if port.up and port.addresses and (port.device or _address(port, network))
    ]


def cluster_release(release: Release, settings: Settings, fabric: Mapping[str, Ports]) -> Release:
    """Return the common release of all cluster members.

    The port is computed from the rest of the release.
    """
    endpoints = member_endpoints(settings, fabric)
    offset = int(digest_of({"release": release, "links": endpoints})[:8], 16) % (_PORTS // 2)
    port = _FIRST_PORT + 2 * offset
    addresses = [endpoint.address for endpoint in endpoints]
    members = tuple(
        Member(
            host=endpoint.host,
            address=endpoint.address,
            argv=rank_arguments(rank, addresses, port),
            env=_environment(endpoint),
            docker_args=_RDMA_ARGUMENTS if endpoint.devices else (),
        )
        for rank, endpoint in enumerate(endpoints)
    )
    # Ranks need the host network, because they agree on further ports only while they run.
    docker_args = tuple(
        "--network=host" if argument == "--network=none" else argument
        for argument in release.engine.docker_args
    )
    return replace(
        release,
        engine=replace(release.engine, docker_args=docker_args),
        cluster=Cluster(members, port, max(120, settings.serve.start_timeout_s // 4)),
    )


def _environment(endpoint: Endpoint) -> dict[str, str]:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_NET_DEVICES")
    variables = {name: endpoint.interface for name in names} | {"VLLM_HOST_IP": endpoint.address}
    if not endpoint.devices:
        return {**variables, "NCCL_IB_DISABLE": "1"}
    variables |= {
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": ",".join(endpoint.devices),
        "NCCL_IGNORE_CPU_AFFINITY": "1",
    }
    if endpoint.gid_index is not None:
        variables["NCCL_IB_GID_INDEX"] = str(endpoint.gid_index)
    return variables


Wave = tuple[str, ...]


def plan_waves(
    rollouts: Mapping[str, RolloutSettings], clusters: Iterable[Wave] = ()
) -> tuple[Wave, ...]:
    """Return the waves of a rollout, each with the hosts to update together.

    Canaries come first, in separate waves; then the rest in inventory order. The smallest
    ``at_once`` of the hosts limits a wave. The members of a cluster share a wave.
    """
    cluster_waves = [wave for wave in dict.fromkeys(clusters) if wave]
    members = {host for wave in cluster_waves for host in wave}
    standalone = {host: rollout for host, rollout in rollouts.items() if host not in members}
    waves = _standalone_waves(standalone)
    canaries = {rollout.canary for rollout in rollouts.values()}
    for wave in cluster_waves:
        waves.insert(0 if canaries.intersection(wave) else len(waves), wave)
    return tuple(waves)


def _standalone_waves(rollouts: Mapping[str, RolloutSettings]) -> list[Wave]:
    """Return the waves of hosts outside clusters, canaries first."""
    canary_names = {rollout.canary for rollout in rollouts.values()}
    canaries = [name for name in rollouts if name in canary_names]
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
