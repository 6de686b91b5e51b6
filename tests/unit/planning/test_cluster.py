import re
from dataclasses import replace

import pytest
import yaml

from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.host import ClusterSettings, FabricSettings
from spark_deploy.config.settings.service import RolloutSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.cluster import (
    existing_addresses,
    fabric_links,
    fabric_plan,
    member_links,
    plan_waves,
)
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.release import release_files
from spark_deploy.plan.resolve import Request, plan_problems
from spark_deploy.plan.types import Port, Ports
from tests.unit.planning.plans import (
    CATALOG,
    PAYLOAD,
    made_up_lock,
    plan_of,
    settings_of,
    shipped_catalog,
)

PAIR = ("spark-1", "spark-2")
LAN = Port("enP7s7", True, 1500, 10000, ("192.168.1.10/24",), None, None)


def cabled_ports(cage, last, *, gid=3):
    """Return the four interfaces of a Spark with a cable in cage 0 or 1."""
    ports = []
    for number in (0, 1):
        for pci, net in (("p1s0", 100), ("P2p1s0", 101)):
            up = number == cage
            address = (f"192.168.{net}.{last}/24",) if up else ()
            device = f"roce{pci}f{number}" if up else None
            name = f"en{pci}f{number}np{number}"
            ports.append(Port(name, up, 9000, 200000, address, device, gid if up else None))
    return tuple(ports)


def without_addresses(cage):
    return tuple(replace(port, addresses=(), mtu=1500) for port in cabled_ports(cage, 0))


FABRIC = {
    "spark-1": Ports((LAN, *cabled_ports(1, 10))),
    "spark-2": Ports((LAN, *cabled_ports(0, 11, gid=5))),
}


def clustered(hosts=PAIR, model="large", **cluster):
    return replace(settings_of(model), cluster=ClusterSettings(hosts=hosts, **cluster))


def plan_on(host, ports, settings=None):
    settings = settings or clustered()
    lock = made_up_lock(settings, CATALOG)
    return plan_host(Request(host, settings, CATALOG, lock, PAYLOAD, ports))


def test_both_interfaces_on_a_cable_connect_to_the_peer():
    links = member_links(clustered(), "spark-1", FABRIC)
    assert {(link.interface, link.host, link.address) for link in links} == {
        ("enp1s0f1np1", "spark-2", "192.168.100.11"),
        ("enP2p1s0f1np1", "spark-2", "192.168.101.11"),
    }


def test_each_rank_gets_its_index_and_its_interface_and_devices():
    head, worker = plan_on("spark-2", FABRIC).release.cluster.members
    port = str(plan_on("spark-1", FABRIC).release.cluster.port)
    assert head.argv == (
        "--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", "0",
        "--master-addr", "192.168.100.10", "--master-port", port,
    )  # fmt: skip
    assert (worker.argv[5], worker.argv[-1]) == ("1", "--headless")
    sockets = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_NET_DEVICES")
    assert head.env == {
        **dict.fromkeys(sockets, "enp1s0f1np1"), "VLLM_HOST_IP": "192.168.100.10",
        "NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "roceP2p1s0f1,rocep1s0f1",
        "NCCL_IB_GID_INDEX": "3", "NCCL_IGNORE_CPU_AFFINITY": "1",
    }  # fmt: skip
    names = (*sockets[:1], "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "VLLM_HOST_IP")
    assert [worker.env[name] for name in names] == [
        "enp1s0f0np0", "roceP2p1s0f0,rocep1s0f0", "5", "192.168.100.11",
    ]  # fmt: skip


def test_cluster_uses_only_devices_with_the_main_gid_index():
    first, second, *others = cabled_ports(0, 11)
    ports = Ports((LAN, first, replace(second, gid_index=9), *others))
    up = [port for port in (first, second) if port.up]
    _, worker = plan_on("spark-1", {**FABRIC, "spark-2": ports}).release.cluster.members
    assert len(up) == 2
    assert worker.env["NCCL_IB_HCA"] == first.device


@pytest.mark.parametrize(("start_s", "join_s"), [(1200, 300), (40, 120)])
def test_members_have_a_quarter_of_the_start_time_to_join(start_s, join_s):
    settings = clustered()
    settings = replace(settings, serve=replace(settings.serve, start_timeout_s=start_s))
    assert plan_on("spark-1", FABRIC, settings).release.cluster.join_s == join_s


def test_only_cluster_members_use_the_host_network():
    single, member = plan_of("large").release, plan_on("spark-1", FABRIC).release
    assert single.cluster is None
    assert "--network=none" in single.engine.docker_args
    assert "--network=host" in member.engine.docker_args
    assert member.cluster.head.docker_args == ("--ulimit=memlock=-1:-1", "--device=/dev/infiniband")
    single_args, member_args = (
        [argument for argument in release.engine.docker_args if "--network" not in argument]
        for release in (single, member)
    )
    assert single_args == member_args


def test_unit_of_a_cluster_member_closes_its_ports_to_other_hosts():
    plan = plan_on("spark-1", FABRIC)
    path = f"{plan.release.serve_unit}.d/50-cluster.conf"
    [text] = [f.content.decode() for f in release_files(plan) if f.path.endswith(path)]
    fence = f"/usr/local/lib/spark/current/bin/spark-host fence {{}} {plan.release.name}"
    # "-": a host without iptables serves, too; "+": with root's rights.
    assert f"ExecStartPre=-+{fence.format('up')}" in text
    assert f"ExecStopPost=-+{fence.format('down')}" in text
    assert not [file for file in release_files(plan_of("large")) if "cluster" in file.path]


def test_subnet_without_rdma_uses_tcp():
    ports = {host: Ports((replace(LAN, addresses=(f"10.1.0.{number}/16",)),))
             for number, host in enumerate(PAIR, 1)}  # fmt: skip
    head = plan_on("spark-1", ports, clustered(subnet="10.1.0.0/16")).release.cluster.head
    assert (head.address, head.docker_args) == ("10.1.0.1", ())
    assert head.env["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_HCA" not in head.env


def test_rejects_members_without_a_common_network():
    apart = tuple(
        replace(port, addresses=(f"10.{number}.0.2/24",)) if port.up else port
        for number, port in enumerate(cabled_ports(0, 11))
    )
    settings = clustered(subnet="192.168.0.0/16")
    down = tuple(replace(port, up=False) for port in FABRIC["spark-2"].ports)
    bare = (LAN, Port("enp1s0f0np0", False, 1500, None, (), None, None))
    for ports, more, refused in (
        (apart, None, ["spark-1: cluster", "spark-2: cluster"]),
        (apart, settings, ["spark-2: cluster"]),
        (down, settings, ["spark-2: cluster"]),
        (bare, None, ["spark-2: cluster"]),
    ):
        with pytest.raises(PlanError) as error:
            plan_on("spark-1", {**FABRIC, "spark-2": Ports(ports)}, more)
        assert [problem.where for problem in error.value.problems] == refused
    assert "enp1s0f0np0 down no address" in str(error.value)


def readdressed(ports, *addresses):
    remaining = iter(addresses)
    return tuple(replace(p, addresses=(next(remaining),)) if p.up else p for p in ports)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (readdressed((LAN, *cabled_ports(0, 11)), "192.168.100.2/24", "192.168.100.11/24",
                     "192.168.101.11/24"),
         "spark-2: enp1s0f0np0: enP7s7 is also in 192.168.100.0/24"),
        (readdressed((LAN, *cabled_ports(0, 11)), "192.168.1.2/24", "192.168.100.11/24",
                     "192.168.100.12/24"),
         "spark-2: enP2p1s0f0np0: enp1s0f0np0 is also in 192.168.100.0/24"),
        ((LAN, *cabled_ports(1, 10)), "spark-2: cluster: 192.168.100.10 is also an address of"),
    ],
)  # fmt: skip
def test_rejects_ambiguous_networks(second, message):
    with pytest.raises(PlanError) as error:
        plan_on("spark-1", {**FABRIC, "spark-2": Ports(second)})
    assert message in str(error.value)


def test_each_cluster_release_has_separate_ports():
    base = clustered()
    watch = replace(base.watch, stall_s=10 * base.watch.stall_s)
    clusters = [plan_on("spark-1", FABRIC, settings).release.cluster
                for settings in (base, replace(base, watch=watch))]  # fmt: skip
    assert clusters[0].port != clusters[1].port
    assert all(29500 <= cluster.port < cluster.serving_port < 31500 for cluster in clusters)
    assert all(cluster.port % 2 == 0 for cluster in clusters)


def test_plan_without_host_facts_has_placeholder_addresses():
    assert "ADDRESS-OF-spark-1" in plan_on("spark-1", {}).release.cluster.members[1].argv


def test_two_hosts_split_weights_and_have_more_cache():
    single, pair = plan_of("large").memory, plan_on("spark-1", FABRIC).memory
    assert 0.5 < pair.weights_bytes / single.weights_bytes < 0.55
    assert pair.kv_tokens > 2 * single.kv_tokens


@pytest.mark.parametrize(("count", "fits"), [(1, False), (2, False), (4, True)])
def test_397b_model_needs_four_hosts(count, fits):
    hosts = tuple(f"spark-{number}" for number in range(count)) if count > 1 else ()
    settings = Settings(model="qwen3.5-397b", cluster=ClusterSettings(hosts=hosts))
    problems = plan_problems(settings, shipped_catalog())
    assert not problems if fits else "or serve qwen3.5-397b on 4 hosts together" in problems[0].fix


def test_suggests_host_counts_that_split_model_evenly():
    three = Settings(cluster=ClusterSettings(hosts=("a", "b", "c")))
    problem = plan_problems(three, shipped_catalog())[0]
    assert problem.where == "cluster.hosts"
    assert "2 KV heads" in problem.what
    assert problem.fix == "use 2 or 4 hosts"


@pytest.mark.parametrize(
    ("hosts", "options", "rule"),
    [
        ("abcdefgh", {}, "experts-of-one-group"),
        ("ab", {"tensor-parallel-size": 2}, "one-gpu-in-a-host"),
        ("ab", {"nnodes": 2}, "one-gpu-in-a-host"),
        ("ab", {"pipeline-parallel-size": 2}, "one-gpu-in-a-host"),
        ("ab", {"distributed-executor-backend": "ray"}, "ray"),
    ],
)
def test_guard_rails_apply_to_clusters(hosts, options, rule):
    settings = Settings(cluster=ClusterSettings(hosts=tuple(hosts)))
    settings = replace(settings, engine=replace(settings.engine, options=options))
    assert f"guard rail {rule}:" in plan_problems(settings, shipped_catalog())[0].what


def test_rejects_prefix_caching_for_397b_on_two_hosts():
    pair = Settings(
        model="qwen3.5-397b", profile="agent", cluster=ClusterSettings(hosts=PAIR),
        memory=replace(Settings().memory, total_gib=400),
    )  # fmt: skip
    assert "prefixes-on-a-pair-of-397b" in plan_problems(pair, shipped_catalog())[0].what
    four = replace(pair, cluster=ClusterSettings(hosts=(*PAIR, "c", "d")))
    assert not plan_problems(four, shipped_catalog())


@pytest.mark.parametrize(
    ("version", "refused"),
    [("2.28.9", True), ("2.29.2", True), ("2.29.3", False), ("2.29.30", False), ("2.30.4", False)],
)
def test_check_rejects_nccl_versions_that_deadlock(version, refused):
    line = f"INFO 11-22 [pynccl.py:148] vLLM is using nccl=={version}"
    pair, single = plan_on("spark-1", FABRIC).release.check, plan_of("large").release.check
    assert any(re.search(pattern, line) for pattern in pair.log_forbidden) is refused
    assert not any(re.search(pattern, line) for pattern in single.log_forbidden)


def fabric_settings(*hosts, cluster=None, **fabric):
    cluster = cluster or (ClusterSettings() if hosts else ClusterSettings(hosts=PAIR))
    return replace(
        settings_of("large"), fabric=FabricSettings(hosts=hosts, **fabric), cluster=cluster
    )


def network_plan(host, *ports, **fabric):
    return fabric_plan(host, fabric_settings(**fabric), Ports(ports))


def addresses(plan):
    return {port.interface: port.address for port in plan.ports}


def test_both_interfaces_of_a_port_get_addresses_in_separate_networks():
    assert addresses(network_plan("spark-1", LAN, *reversed(without_addresses(1)))) == {
        "enp1s0f1np1": "192.168.100.11/24", "enP2p1s0f1np1": "192.168.101.11/24",
    }  # fmt: skip
    assert addresses(network_plan("spark-2", LAN, *without_addresses(0))) == {
        "enp1s0f0np0": "192.168.100.12/24", "enP2p1s0f0np0": "192.168.101.12/24",
    }  # fmt: skip


def test_netplan_configures_only_cabled_ports_and_marks_them_optional():
    plan = network_plan("spark-1", LAN, *without_addresses(1))
    network = yaml.safe_load(plan.netplan)["network"]
    assert network["version"] == 2
    assert network["ethernets"].keys() == addresses(plan).keys()
    for name, port in network["ethernets"].items():
        assert port["addresses"] == [addresses(plan)[name]]
        assert (port["mtu"], port["optional"], port["dhcp4"]) == (9000, True, False)


def test_configures_listed_ports_that_lack_rdma():
    plan = network_plan(
        "spark-2", LAN, Port("eth1", True, 1500, None, (), None, None),
        interfaces=("eth1",), networks=("10.9.0.0/24",), mtu=1500,
    )  # fmt: skip
    assert addresses(plan) == {"eth1": "10.9.0.12/24"}


@pytest.mark.parametrize(
    ("ports", "fabric", "message"),
    [
        ((LAN,), {}, "0 cabled RDMA ports"),
        ((*without_addresses(0)[:2], *without_addresses(1)[2:]), {}, "4 cabled RDMA ports"),
        ((LAN, *without_addresses(1)), {"interfaces": ("eth7", "eth8")},
         "eth7, eth8: no such interface"),
        ((LAN, *cabled_ports(1, 50)), {}, "already has 192.168.100.50/24"),
        ((LAN, *without_addresses(1)), {"networks": ("192.168.1.0/24", "192.168.2.0/24")},
         "used by enP7s7"),
    ],
)  # fmt: skip
def test_rejects_conflicting_fabric_ports(ports, fabric, message):
    with pytest.raises(PlanError, match=message):
        network_plan("spark-1", *ports, **fabric)


def test_rejects_host_outside_fabric():
    with pytest.raises(PlanError, match=r"fabric\.hosts"):
        network_plan("spark-9", LAN, *without_addresses(1))


def test_lists_existing_addresses_if_every_fabric_port_has_one():
    ports = Ports((LAN, *cabled_ports(1, 50)))
    assert existing_addresses("spark-1", fabric_settings(), ports) == (
        "enp1s0f1np1 192.168.100.50/24, enP2p1s0f1np1 192.168.101.50/24"
    )
    assert not existing_addresses("spark-1", fabric_settings(), Ports((LAN, *without_addresses(1))))


@pytest.mark.parametrize(
    ("fabric", "message"),
    [
        ({"networks": ("8.8.8.0/24",)}, "is not a private network"),
        ({"networks": ("192.168.100.1/24",)}, "has host bits set"),
        ({"networks": ("192.168.100.0/29",)}, "has too few addresses"),
        ({"interfaces": ("eth1",)}, "1 interfaces are listed for 2 networks"),
        ({"measure": True, "restore": True}, "restored networks cannot be measured"),
    ],
)
def test_rejects_unusable_fabric_settings(fabric, message):
    assert [broken for broken in FabricSettings(**fabric).violations() if message in broken.what]


def test_fabric_links_include_both_interfaces_in_both_directions():
    links = [
        (link.interface, link.address)
        for host in PAIR
        for link in fabric_links(host, fabric_settings(*PAIR), FABRIC)
    ]
    assert links == [
        ("enp1s0f1np1", "192.168.100.11"), ("enP2p1s0f1np1", "192.168.101.11"),
        ("enp1s0f0np0", "192.168.100.10"), ("enP2p1s0f0np0", "192.168.101.10"),
    ]  # fmt: skip


def test_each_host_measures_the_link_to_the_next_host():
    names = ("a", "b", "c")
    ports = {name: Ports(cabled_ports(0, number)) for number, name in enumerate(names, 10)}
    settings = fabric_settings(*names)
    assert [fabric_links(name, settings, ports)[0].host for name in names] == ["b", "c", "a"]


def test_links_ignore_a_lan_port_in_the_same_network():
    ports = {
        name: Ports((
            replace(LAN, addresses=(f"192.168.100.{number + 100}/24",)), *cabled_ports(0, number),
        ))
        for number, name in enumerate(PAIR, 10)
    }  # fmt: skip
    links = fabric_links("spark-1", fabric_settings(*PAIR), ports)
    assert [link.address for link in links] == ["192.168.100.11", "192.168.101.11"]
    lan, first, *others = ports["spark-2"].ports
    ports["spark-2"] = Ports((lan, replace(first, up=False), *others))
    [link] = fabric_links("spark-1", fabric_settings(*PAIR), ports)
    assert link.address == "192.168.101.11"


def test_link_speed_is_limited_by_the_slower_end():
    slow = tuple(replace(port, speed_mbit_per_s=100000) for port in cabled_ports(0, 11))
    links = fabric_links("spark-1", fabric_settings(*PAIR), {**FABRIC, "spark-2": Ports(slow)})
    assert {link.speed_mbit_per_s for link in links} == {100000}


def test_links_without_rdma_are_selected_by_subnet_or_interface():
    ports = {
        name: Ports((LAN, Port("eth1", True, 1400, None, (f"10.9.0.{number}/24",), None, None)))
        for number, name in enumerate(PAIR, 1)
    }
    by_network = fabric_settings(cluster=ClusterSettings(hosts=PAIR, subnet="10.9.0.0/24"))
    by_name = fabric_settings(*PAIR, interfaces=("eth1",), networks=("10.9.0.0/24",))
    for settings in (by_network, by_name):
        [link] = fabric_links("spark-1", settings, ports)
        assert (link.interface, link.address, link.mtu) == ("eth1", "10.9.0.2", 1400)


def test_link_measurement_requires_addresses_and_a_second_host():
    bare = {**FABRIC, "spark-2": Ports((LAN, *without_addresses(0)))}
    with pytest.raises(PlanError, match="shares a network with spark-2"):
        fabric_links("spark-1", fabric_settings(*PAIR), bare)
    alone = fabric_settings(cluster=ClusterSettings())
    for host, settings in (
        ("spark-9", fabric_settings(*PAIR)),
        ("spark-1", fabric_settings("spark-1")),
        ("spark-1", alone),
    ):
        with pytest.raises(PlanError, match="fabric of several hosts"):
            fabric_links(host, settings, FABRIC)


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({}, "a | b | c | d | e"),
        ({"at_once": 2}, "a b | c d | e"),
        ({"at_once": "all"}, "a b c d e"),
        ({"canary": "c"}, "c | a | b | d | e"),
        ({"canary": "c", "at_once": 3}, "c | a b d | e"),
        ({"canary": "c", "at_once": "all"}, "c | a b d e"),
        ({"canary": "elsewhere", "at_once": "all"}, "a b c d e"),
    ],
)
def test_hosts_are_updated_in_waves_after_the_canary(rollout, expected):
    waves = plan_waves(dict.fromkeys("abcde", RolloutSettings(**rollout)))
    assert " | ".join(" ".join(wave) for wave in waves) == expected


def test_smallest_at_once_value_limits_the_wave_size():
    at_once = {"a": "all", "b": "all", "c": 2, "d": "all", "e": "all"}
    waves = plan_waves({host: RolloutSettings(n) for host, n in at_once.items()})
    assert waves == (("a", "b"), ("c", "d"), ("e",))


def test_cluster_members_are_updated_in_the_same_wave():
    plain = dict.fromkeys("abcd", RolloutSettings())
    assert plan_waves(plain, [("b", "c"), ("b", "c"), ()]) == (("a",), ("d",), ("b", "c"))
    canary = dict.fromkeys("abcd", RolloutSettings(canary="c"))
    assert plan_waves(canary, [("b", "c")]) == (("b", "c"), ("a",), ("d",))
