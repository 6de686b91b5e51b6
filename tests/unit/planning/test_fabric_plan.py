"""Which addresses ports between hosts get, and what is left alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml
from spark_contract.fabric import FabricPlan

from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.cluster import ClusterSettings, FabricSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.fabric import fabric_plan, there_already
from spark_deploy.plan.types import Port, Ports
from tests.unit.planning.plans import settings_of
from tests.unit.planning.test_clusters import LAN, PAIR, of_cable


def bare(cage: int) -> tuple[Port, ...]:
    """Return the four interfaces of a Spark with one cable and no address."""
    return tuple(dataclasses.replace(port, addresses=(), mtu=1500) for port in of_cable(cage, 0))


def settings(**fabric: Any) -> Settings:
    chosen = FabricSettings(**fabric)
    return dataclasses.replace(
        settings_of("large"), fabric=chosen, cluster=ClusterSettings(hosts=PAIR)
    )


def plan(host: str, *ports: Port, **fabric: Any) -> FabricPlan:
    return fabric_plan(host, settings(**fabric), Ports(ports))


def addresses(made: FabricPlan) -> dict[str, str]:
    return {port.interface: port.address for port in made.ports}


def test_each_twin_of_the_cabled_cage_gets_an_address_in_a_network_of_its_own() -> None:
    first = plan("spark-1", LAN, *reversed(bare(1)))
    second = plan("spark-2", LAN, *bare(0))
    assert addresses(first) == {
        "enp1s0f1np1": "192.168.100.11/24", "enP2p1s0f1np1": "192.168.101.11/24",
    }  # fmt: skip
    # Another cage, the same networks: twins of both hosts meet.
    assert addresses(second) == {
        "enp1s0f0np0": "192.168.100.12/24", "enP2p1s0f0np0": "192.168.101.12/24",
    }  # fmt: skip


def test_netplan_s_file_names_those_ports_alone_and_no_boot_waits_for_a_cable() -> None:
    made = plan("spark-1", LAN, *bare(1))
    found = yaml.safe_load(made.netplan)["network"]
    assert found["version"] == 2
    assert found["ethernets"].keys() == addresses(made).keys()
    for name, port in found["ethernets"].items():
        assert port["addresses"] == [addresses(made)[name]]
        assert (port["mtu"], port["optional"], port["dhcp4"]) == (9000, True, False)


def test_ports_without_rdma_are_named_by_their_owner() -> None:
    made = plan(
        "spark-2", LAN, Port("eth1", True, 1500, None, (), None, None),
        interfaces=("eth1",), networks=("10.9.0.0/24",), mtu=1500,
    )  # fmt: skip
    assert addresses(made) == {"eth1": "10.9.0.12/24"}


@pytest.mark.parametrize(
    ("ports", "fabric", "told"),
    [
        ((LAN,), {}, "0 ports with RDMA and a cable"),
        ((*bare(0)[:2], *of_cable(0, 0)[:0], *bare(1)[2:]), {}, "4 ports with RDMA"),
        ((LAN, *bare(1)), {"interfaces": ("eth7", "eth8")}, "eth7, eth8: no such interface"),
        ((LAN, *of_cable(1, 50)), {}, "already has 192.168.100.50/24"),
        ((LAN, *bare(1)), {"networks": ("192.168.1.0/24", "192.168.2.0/24")},
         "used by enP7s7"),
    ],
)  # fmt: skip
def test_what_it_must_not_touch_is_refused(
    ports: tuple[Port, ...], fabric: dict[str, Any], told: str
) -> None:
    with pytest.raises(PlanError, match=told):
        plan("spark-1", *ports, **fabric)


def test_a_host_that_is_not_named_gets_no_address() -> None:
    with pytest.raises(PlanError, match=r"fabric\.hosts"):
        plan("spark-9", LAN, *bare(1))


def test_a_network_that_is_there_is_seen() -> None:
    there = there_already("spark-1", settings(), Ports((LAN, *of_cable(1, 50))))
    assert there == "enp1s0f1np1 192.168.100.50/24, enP2p1s0f1np1 192.168.101.50/24"
    assert not there_already("spark-1", settings(), Ports((LAN, *bare(1))))


@pytest.mark.parametrize(
    ("fabric", "told"),
    [
        ({"networks": ("8.8.8.0/24",)}, "is no private network"),
        ({"networks": ("192.168.100.1/24",)}, "has host bits set"),
        ({"networks": ("192.168.100.0/29",)}, "has too few addresses"),
        ({"interfaces": ("eth1",)}, "1 interfaces for 2 networks"),
        ({"measure": True, "restore": True}, "nothing to measure after restore"),
    ],
)
def test_networks_that_nothing_can_be_made_of_are_refused_before_a_host_is_asked(
    fabric: dict[str, Any], told: str
) -> None:
    assert [one for one in FabricSettings(**fabric).broken() if told in one.what]
