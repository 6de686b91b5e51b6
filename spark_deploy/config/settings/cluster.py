"""Settings of hosts that serve a model together or side by side, and of the cable between them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from pydantic import Field
from pydantic.dataclasses import dataclass

from spark_deploy.config.documents import CLOSED, UNIQUE, Text, Violation, form
from spark_deploy.config.settings.patterns import Interface, IpAddress

_FIRST = 11  # the last number of the first host's addresses on a cable


@dataclass(frozen=True, slots=True, config=CLOSED)
class ClusterSettings:
    """Hosts that serve one model together, each with its part of every layer; null: none."""

    hosts: tuple[Text, ...] = Field(
        default=(), examples=[["spark-1", "spark-2"]], json_schema_extra=UNIQUE
    )
    """Names in the inventory of the hosts that serve one model together, one rank each; the first
    is the head, which clients talk to. A host that is not named serves by itself. Members need the
    same choices, so write it into group_vars."""
    subnet: str | None = Field(
        default=None,
        examples=["192.168.100.0/24"],
        json_schema_extra=form(r"^[0-9.]+/[0-9]+$", "a network with its size", "192.168.100.0/24"),
    )
    """Network over which they reach each other, such as 192.168.100.0/24; its addresses have to
    stay the same. null: the one in which every member has an address on a port with RDMA."""
    join_s: int = Field(default=600, ge=120)
    """Seconds a start waits for the other members before it ends, to be tried again a minute later;
    well above that minute, so that members find each other."""

    def broken(self) -> Iterator[Violation]:
        """Yield what no cluster can be made of."""
        if len(self.hosts) == 1:
            what = f"{self.hosts[0]} alone is no cluster"
            yield Violation(("hosts",), what, "name two hosts or more, or none")
        try:
            ipaddress.IPv4Network(self.subnet or "0.0.0.0/0")
        except ValueError as error:
            yield Violation(("subnet",), str(error), "write it as in 192.168.100.0/24")


@dataclass(frozen=True, slots=True, config=CLOSED)
class ReplicasSettings:
    """Hosts that serve the same, each by itself, behind one address; without hosts: none."""

    hosts: tuple[Text, ...] = Field(
        default=(), examples=[["spark-1", "spark-2"]], json_schema_extra=UNIQUE
    )
    """Names in the inventory of the hosts. Each also listens at `port` and hands every request to
    the one that has the fewest under way and serves what was proven; the first is what `connect`
    tells. They need the same choices and one serve.api_key, so write it into group_vars."""
    port: int = Field(default=8008, ge=1, le=65535, description="Port for all of them together.")
    addresses: dict[str, IpAddress] = Field(
        default_factory=dict, examples=[{"spark-1": "192.168.100.11", "spark-2": "192.168.100.12"}]
    )
    """Addresses at which they reach each other, by name, best on the fastest network; who is not
    named is reached as by clients."""

    def broken(self) -> Iterator[Violation]:
        """Yield what no replicas can be made of."""
        if len(self.hosts) == 1:
            what = f"{self.hosts[0]} alone has no replica"
            yield Violation(("hosts",), what, "name two hosts or more, or none")
        for name in self.addresses:
            if name not in self.hosts:
                yield Violation(("addresses", name), "is none of the hosts", "name it there, too")


@dataclass(frozen=True, slots=True, config=CLOSED)
class FabricSettings:
    """What `spark-deploy fabric` sets up. A deploy never does: it takes the network it finds."""

    hosts: tuple[Text, ...] = Field(
        default=(),
        examples=[["spark-1", "spark-2"]],
        json_schema_extra=UNIQUE,
    )
    """Hosts on the cables, in the order of their addresses: the first gets .11. Empty: those of
    cluster.hosts."""
    networks: tuple[Text, ...] = Field(
        default=("192.168.100.0/24", "192.168.101.0/24"), min_length=1, json_schema_extra=UNIQUE
    )
    """One network for each interface of the cabled cage, in the order of their names; nothing else
    at your place may use them. One network for both breaks routing."""
    interfaces: tuple[Interface, ...] = Field(
        default=(), examples=[["enp1s0f0np0", "enP2p1s0f0np0"]], json_schema_extra=UNIQUE
    )
    """The interfaces, in the order of the networks. Empty: those with RDMA and a cable, which have
    to be as many as the networks. They may differ from host to host: write them into host_vars
    then."""
    mtu: int = Field(default=9000, ge=1280, le=9216)
    """Largest packet; the same at both ends."""
    confirm_s: int = Field(default=90, ge=20, le=600)
    """Seconds after which the old network returns by itself, unless a new login over the address
    that deploys use has confirmed the new one."""
    measure: bool = False
    """Set nothing up: send 1 GB at most, for 2.5 seconds at most, from each host to the next over
    each cabled port. On the command line: `spark-deploy fabric --measure`."""
    restore: bool = False
    """Take back what was set up. Given on the command line: `spark-deploy fabric --restore`."""

    def address(self, number: int, network: str) -> str:
        """Return the address of the host of this number, with the length of the network."""
        found = ipaddress.IPv4Network(network)
        return f"{found[_FIRST + number]}/{found.prefixlen}"

    def broken(self) -> Iterator[Violation]:
        """Yield what no network can be made of."""
        for number, text in enumerate(self.networks):
            key = ("networks", number)
            try:
                network = ipaddress.IPv4Network(text)
            except ValueError as error:
                yield Violation(key, str(error), "write it as in 192.168.100.0/24")
                continue
            if not network.is_private:
                yield Violation(
                    key, "is no private network", "take one of 192.168.0.0/16 or 10.0.0.0/8"
                )
            if network.num_addresses < _FIRST + len(self.hosts) + 2:
                yield Violation(key, "has too few addresses", "take a /24")
        if self.measure and self.restore:
            yield Violation(
                ("measure",), "there is nothing to measure after restore", "leave one out"
            )
        if self.interfaces and len(self.interfaces) != len(self.networks):
            what = f"{len(self.interfaces)} interfaces for {len(self.networks)} networks"
            yield Violation(("interfaces",), what, "name one interface for each of fabric.networks")
