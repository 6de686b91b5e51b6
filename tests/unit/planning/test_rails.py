"""Which ways between hosts are measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.cluster import ClusterSettings, FabricSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.fabric import rails
from spark_deploy.plan.types import Port, Ports
from tests.unit.planning.plans import settings_of
from tests.unit.planning.test_clusters import FABRIC, LAN, PAIR, of_cable
from tests.unit.planning.test_fabric_plan import bare


def settings(*hosts: str, cluster: ClusterSettings | None = None, **fabric: Any) -> Settings:
    chosen = FabricSettings(hosts=hosts, **fabric)
    return dataclasses.replace(
        settings_of("large"), fabric=chosen, cluster=cluster or ClusterSettings()
    )


def test_both_rails_of_a_cable_are_measured_from_both_ends_and_no_other_port() -> None:
    there = [
        (one.interface, one.address)
        for host in PAIR
        for one in rails(host, settings(*PAIR), FABRIC)
    ]
    assert there == [
        ("enp1s0f1np1", "192.168.100.11"), ("enP2p1s0f1np1", "192.168.101.11"),
        ("enp1s0f0np0", "192.168.100.10"), ("enP2p1s0f0np0", "192.168.101.10"),
    ]  # fmt: skip


def test_of_many_hosts_each_sends_to_the_next_and_the_last_to_the_first() -> None:
    names = ("a", "b", "c")
    found = {name: Ports(of_cable(0, number)) for number, name in enumerate(names, 10)}
    assert [rails(name, settings(*names), found)[0].host for name in names] == ["b", "c", "a"]


def test_a_cable_in_the_network_of_the_hosts_is_measured_port_to_port() -> None:
    """The same network at both ports: the peer's port for deploys is no end of the cable."""
    found = {
        name: Ports((
            dataclasses.replace(LAN, addresses=(f"192.168.100.{number + 100}/24",)),
            *of_cable(0, number),
        ))
        for number, name in enumerate(PAIR, 10)
    }  # fmt: skip
    ways = rails("spark-1", settings(*PAIR), found)
    assert [one.address for one in ways] == ["192.168.100.11", "192.168.101.11"]


def test_the_slower_end_is_what_a_link_says() -> None:
    slow = tuple(dataclasses.replace(port, speed_mbit_per_s=100000) for port in of_cable(0, 11))
    found = {**FABRIC, "spark-2": Ports(slow)}
    assert {one.speed_mbit_per_s for one in rails("spark-1", settings(*PAIR), found)} == {100000}


def test_ports_without_rdma_are_those_of_the_named_network_or_interfaces() -> None:
    found = {
        name: Ports((LAN, Port("eth1", True, 1400, None, (f"10.9.0.{number}/24",), None, None)))
        for number, name in enumerate(PAIR, 1)
    }
    by_network = settings(cluster=ClusterSettings(hosts=PAIR, subnet="10.9.0.0/24"))
    by_name = settings(*PAIR, interfaces=("eth1",), networks=("10.9.0.0/24",))
    for chosen in (by_network, by_name):
        [way] = rails("spark-1", chosen, found)
        assert (way.interface, way.address, way.mtu) == ("eth1", "10.9.0.2", 1400)


def test_a_cable_without_addresses_and_a_host_that_is_not_named_are_refused() -> None:
    with pytest.raises(PlanError, match="shares a network with spark-2"):
        rails("spark-1", settings(*PAIR), {**FABRIC, "spark-2": Ports((LAN, *bare(0)))})
    for host, named in (("spark-9", PAIR), ("spark-1", ("spark-1",)), ("spark-1", ())):
        with pytest.raises(PlanError, match="fabric of several hosts"):
            rails(host, settings(*named), FABRIC)
