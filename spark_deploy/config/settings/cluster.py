"""Settings of clusters, of replicas, and of the network between hosts."""

import ipaddress
from collections.abc import Iterator

from pydantic import Field
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema

from spark_deploy.config.documents import CLOSED, UNIQUE, Text, Violation, text_schema
from spark_deploy.config.settings.patterns import Interface

_FIRST_ADDRESS = 11  # number of the first host's address in a network


@dataclass(frozen=True, slots=True, config=CLOSED)
class ClusterSettings:
    """Hosts that serve a model together (tensor parallel); empty: none."""

    hosts: tuple[Text, ...] = Field(
        default=(), examples=[["spark-1", "spark-2"]], json_schema_extra=UNIQUE
    )
    """Inventory names of the hosts, with one rank per host; clients connect to the first. All need
    the same settings, so use group_vars."""
    subnet: str | None = Field(
        default=None,
        examples=["192.168.100.0/24"],
        json_schema_extra=text_schema(
            r"^[0-9.]+/[0-9]+$", "a network with a prefix length", "192.168.100.0/24"
        ),
    )
    """Network between the members, with fixed addresses. null: the network in which every member
    has an RDMA port."""

    def violations(self) -> Iterator[Violation]:
        if len(self.hosts) == 1:
            message = f"{self.hosts[0]} is the only host"
            yield Violation(("hosts",), message, "list at least two hosts, or none")
        try:
            ipaddress.IPv4Network(self.subnet or "0.0.0.0/0")
        except ValueError as error:
            yield Violation(("subnet",), str(error), "write a network such as 192.168.100.0/24")


@dataclass(frozen=True, slots=True, config=CLOSED)
class ReplicasSettings:
    """Hosts that serve the same model independently behind a shared address; empty: none."""

    hosts: tuple[Text, ...] = Field(
        default=(), examples=[["spark-1", "spark-2"]], json_schema_extra=UNIQUE
    )
    """Inventory names of the hosts. Each routes requests to the proven host with the fewest running
    requests, and a conversation to one host. All need the same settings and serve.api_key, so use
    group_vars."""
    port: int = Field(default=8008, ge=1, le=65535, description="Shared port of the replicas.")
    # Filled by the inventory: fleet.address of each host, or its address for clients.
    addresses: SkipJsonSchema[dict[str, str]] = Field(default_factory=dict, exclude=True)

    def violations(self) -> Iterator[Violation]:
        if len(self.hosts) == 1:
            message = f"{self.hosts[0]} is the only host"
            yield Violation(("hosts",), message, "list at least two hosts, or none")


@dataclass(frozen=True, slots=True, config=CLOSED)
class FabricSettings:
    """Network setup of `spark-deploy fabric`. A deploy never changes the network."""

    hosts: tuple[Text, ...] = Field(
        default=(),
        examples=[["spark-1", "spark-2"]],
        json_schema_extra=UNIQUE,
    )
    """Cabled hosts in the order of their addresses, which start at .11. Empty: cluster.hosts."""
    networks: tuple[Text, ...] = Field(
        default=("192.168.100.0/24", "192.168.101.0/24"), min_length=1, json_schema_extra=UNIQUE
    )
    """A private network for each cabled interface, in the order of their names. A shared network
    breaks routing."""
    interfaces: tuple[Interface, ...] = Field(
        default=(), examples=[["enp1s0f0np0", "enP2p1s0f0np0"]], json_schema_extra=UNIQUE
    )
    """Interfaces in the order of the networks. Empty: all cabled RDMA interfaces. If they differ
    between hosts, use host_vars."""
    mtu: int = Field(default=9000, ge=1280, le=9216)
    """MTU at both ends."""
    measure: bool = False
    """Only measure: send up to 1 GB (2.5 seconds) from each host to the next over each cabled
    port."""
    restore: bool = False
    """Restore the old network."""

    def address(self, index: int, network: str) -> str:
        parsed = ipaddress.IPv4Network(network)
        return f"{parsed[_FIRST_ADDRESS + index]}/{parsed.prefixlen}"

    def violations(self) -> Iterator[Violation]:
        for index, text in enumerate(self.networks):
            key = ("networks", index)
            try:
                network = ipaddress.IPv4Network(text)
            except ValueError as error:
                yield Violation(key, str(error), "write a network such as 192.168.100.0/24")
                continue
            if not network.is_private:
                fix = "use a network in 192.168.0.0/16 or 10.0.0.0/8"
                yield Violation(key, "is not a private network", fix)
            if network.num_addresses < _FIRST_ADDRESS + len(self.hosts) + 2:
                yield Violation(key, "has too few addresses", "use a /24 network")
        if self.measure and self.restore:
            message, fix = "restored networks cannot be measured", "set only measure or restore"
            yield Violation(("measure",), message, fix)
        if self.interfaces and len(self.interfaces) != len(self.networks):
            message = (
                f"{len(self.interfaces)} interfaces are listed for {len(self.networks)} networks"
            )
            fix = "list an interface for each of fabric.networks"
            yield Violation(("interfaces",), message, fix)
