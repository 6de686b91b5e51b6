"""Settings of hosts that serve a model together or side by side, and of the cable between them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from spark_deploy.config.documents.declare import Text, about, form, setting
from spark_deploy.config.settings.rules import INTERFACE, IP_ADDRESS, Broken

# What the engine keeps open between hosts: see planning/cluster.py.
PORTS = 2000
_FIRST = 11  # the last number of the first host's addresses on a cable


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Hosts that serve one model together, each with its part of every layer; null: none."""

    hosts: tuple[Text, ...] = setting(
        (),
        "Names in the inventory of the hosts that serve one model together, one rank each; the "
        "first is the head, which clients talk to. A host that is not named serves by itself. "
        "Members need the same choices, so write it into group_vars.",
        uniqueItems=True,
        examples=[["spark-1", "spark-2"]],
    )
    subnet: str | None = setting(
        None,
        "Network over which they reach each other, such as 192.168.100.0/24; its addresses have "
        "to stay the same. null: the one in which every member has an address on a port with RDMA.",
        **form(r"^[0-9.]+/[0-9]+$", "a network with its size", "192.168.100.0/24"),
        examples=["192.168.100.0/24"],
    )
    port: int = setting(
        29500,
        f"First of the {PORTS} ports among which a release has its own two on the fabric: members "
        "of different releases never meet. The engine opens others at random; all of them are for "
        "the members alone.",
        minimum=1024,
        maximum=65535 - PORTS,
    )
    join_s: int = setting(
        600,
        "Seconds a start waits for the other members before it ends, to be tried again a minute "
        "later; well above that minute, so that members find each other.",
        minimum=120,
    )

    def broken(self) -> Iterator[Broken]:
        """Yield what no cluster can be made of."""
        if len(self.hosts) == 1:
            what = f"{self.hosts[0]} alone is no cluster"
            yield Broken(("hosts",), what, "name two hosts or more, or none")
        try:
            ipaddress.IPv4Network(self.subnet or "0.0.0.0/0")
        except ValueError as error:
            yield Broken(("subnet",), str(error), "write it as in 192.168.100.0/24")


@dataclass(frozen=True, slots=True)
class ReplicasSettings:
    """Hosts that serve the same, each by itself, behind one address; without hosts: none."""

    hosts: tuple[Text, ...] = setting(
        (),
        "Names in the inventory of the hosts. Each also listens at `port` and hands every request "
        "to the one that has the fewest under way and serves what was proven; the first is what "
        "`connect` tells. They need the same choices and one serve.api_key, so write it into "
        "group_vars.",
        uniqueItems=True,
        examples=[["spark-1", "spark-2"]],
    )
    port: int = setting(8008, "Port for all of them together.", minimum=1, maximum=65535)
    addresses: dict[str, Annotated[str, about(**IP_ADDRESS)]] = setting(
        dict,
        "Addresses at which they reach each other, by name, best on the fastest network; who is "
        "not named is reached as by clients.",
        examples=[{"spark-1": "192.168.100.11", "spark-2": "192.168.100.12"}],
    )

    def broken(self) -> Iterator[Broken]:
        """Yield what no replicas can be made of."""
        if len(self.hosts) == 1:
            what = f"{self.hosts[0]} alone has no replica"
            yield Broken(("hosts",), what, "name two hosts or more, or none")
        for name in self.addresses:
            if name not in self.hosts:
                yield Broken(("addresses", name), "is none of the hosts", "name it there, too")


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """What `spark-deploy fabric` sets up. A deploy never does: it takes the network it finds."""

    hosts: tuple[Text, ...] = setting(
        (),
        f"Hosts on the cables, in the order of their addresses: the first gets .{_FIRST}. Empty: "
        "those of cluster.hosts.",
        uniqueItems=True,
        examples=[["spark-1", "spark-2"]],
    )
    networks: tuple[Text, ...] = setting(
        ("192.168.100.0/24", "192.168.101.0/24"),
        "One network for each interface of the cabled cage, in the order of their names; nothing "
        "else at your place may use them. One network for both breaks routing.",
        uniqueItems=True,
        minItems=1,
    )
    interfaces: tuple[Annotated[str, about(**INTERFACE)], ...] = setting(
        (),
        "The interfaces, in the order of the networks. Empty: those with RDMA and a cable, which "
        "have to be as many as the networks. They may differ from host to host: write them into "
        "host_vars then.",
        uniqueItems=True,
        examples=[["enp1s0f0np0", "enP2p1s0f0np0"]],
    )
    mtu: int = setting(9000, "Largest packet; the same at both ends.", minimum=1280, maximum=9216)
    confirm_s: int = setting(
        90,
        "Seconds after which the old network returns by itself, unless a new login over the "
        "address that deploys use has confirmed the new one.",
        minimum=20,
        maximum=600,
    )
    measure: bool = setting(
        False,
        "Set nothing up: send 1 GB at most, for 2.5 seconds at most, from each host to the next "
        "over each cabled port. On the command line: `spark-deploy fabric --measure`.",
    )
    restore: bool = setting(
        False,
        "Take back what was set up. Given on the command line: `spark-deploy fabric --restore`.",
    )

    def address(self, number: int, network: str) -> str:
        """Return the address of the host of this number, with the length of the network."""
        found = ipaddress.IPv4Network(network)
        return f"{found[_FIRST + number]}/{found.prefixlen}"

    def broken(self) -> Iterator[Broken]:
        """Yield what no network can be made of."""
        for number, text in enumerate(self.networks):
            key = ("networks", number)
            try:
                network = ipaddress.IPv4Network(text)
            except ValueError as error:
                yield Broken(key, str(error), "write it as in 192.168.100.0/24")
                continue
            if not network.is_private:
                yield Broken(
                    key, "is no private network", "take one of 192.168.0.0/16 or 10.0.0.0/8"
                )
            if network.num_addresses < _FIRST + len(self.hosts) + 2:
                yield Broken(key, "has too few addresses", "take a /24")
        if self.measure and self.restore:
            yield Broken(("measure",), "there is nothing to measure after restore", "leave one out")
        if self.interfaces and len(self.interfaces) != len(self.networks):
            what = f"{len(self.interfaces)} interfaces for {len(self.networks)} networks"
            yield Broken(("interfaces",), what, "name one interface for each of fabric.networks")
