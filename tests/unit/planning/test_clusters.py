"""Several hosts as one server: what each is told, what it takes, and what is refused."""

import dataclasses
import re

import pytest

from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.cluster import ClusterSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.release import release_files_of
from spark_deploy.plan.resolve import Request, problems_of
from spark_deploy.plan.types import HostPlan, Port, Ports
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


def of_cable(cage: int, last: int, *, gid: int = 3) -> tuple[Port, ...]:
    """Return the four interfaces of a Spark with one cable, in cage 0 or 1."""
    found = []
    for number in (0, 1):
        for pci, net in (("p1s0", 100), ("P2p1s0", 101)):
            up = number == cage
            name = f"en{pci}f{number}np{number}"
            address = (f"192.168.{net}.{last}/24",) if up else ()
            device = f"roce{pci}f{number}" if up else None
            found.append(Port(name, up, 9000, 200000, address, device, gid if up else None))
    return tuple(found)


FABRIC = {
    "spark-1": Ports((LAN, *of_cable(1, 10))),
    "spark-2": Ports((LAN, *of_cable(0, 11, gid=5))),
}


def clustered(hosts: tuple[str, ...] = PAIR, model: str = "large", **cluster: object) -> Settings:
    chosen = ClusterSettings(hosts=hosts, **cluster)
    return dataclasses.replace(settings_of(model), cluster=chosen)


def plan_on(host: str, found: dict[str, Ports], settings: Settings | None = None) -> HostPlan:
    settings = settings or clustered()
    lock = made_up_lock(settings, CATALOG)
    return plan_host(Request(host, settings, CATALOG, lock, PAYLOAD, found))


def test_all_members_get_one_release() -> None:
    first, second = (plan_on(host, FABRIC).serve for host in PAIR)
    assert first == second
    assert first.cluster.head.host == "spark-1"


def test_each_rank_is_told_its_place_its_interface_and_its_devices() -> None:
    head, worker = plan_on("spark-2", FABRIC).serve.cluster.members
    port = str(plan_on("spark-1", FABRIC).serve.cluster.port)
    assert head.argv == (
        "--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", "0",
        "--master-addr", "192.168.100.10", "--master-port", port,
    )  # fmt: skip
    assert worker.argv[-1] == "--headless"
    assert worker.argv[5] == "1"
    # Cabled differently, so the same variables differ from host to host.
    assert head.env["NCCL_SOCKET_IFNAME"] == "enp1s0f1np1"
    assert worker.env["NCCL_SOCKET_IFNAME"] == "enp1s0f0np0"
    assert head.env["NCCL_IB_HCA"] == "roceP2p1s0f1,rocep1s0f1"
    assert worker.env["NCCL_IB_HCA"] == "roceP2p1s0f0,rocep1s0f0"
    assert (head.env["NCCL_IB_GID_INDEX"], worker.env["NCCL_IB_GID_INDEX"]) == ("3", "5")
    assert (head.env["VLLM_HOST_IP"], worker.env["VLLM_HOST_IP"]) == (
        "192.168.100.10", "192.168.100.11",
    )  # fmt: skip


def test_only_members_of_a_cluster_are_on_the_network_of_their_host() -> None:
    alone = plan_of("large").serve
    both = plan_on("spark-1", FABRIC).serve
    assert "--network=none" in alone.engine.docker_args
    assert alone.cluster is None
    assert "--network=host" in both.engine.docker_args
    # Pinned memory and the devices of RDMA are all that is added: no right of root.
    assert both.cluster.head.docker_args == ("--ulimit=memlock=-1:-1", "--device=/dev/infiniband")
    rest = [one for one in both.engine.docker_args if not one.startswith("--network")]
    assert rest == [one for one in alone.engine.docker_args if not one.startswith("--network")]


def test_the_unit_of_a_member_fences_its_ports_and_starts_without_a_fence_as_well() -> None:
    plan = plan_on("spark-1", FABRIC)
    [fenced] = [
        file.content.decode()
        for file in release_files_of(plan)
        if file.path.endswith(f"{plan.serve.serve_unit}.d/50-cluster.conf")
    ]
    told = f"/usr/local/lib/spark/current/bin/spark-host fence {{}} {plan.serve.name}"
    # "-": a host without iptables serves; "+": the unit itself has no right to the network.
    assert f"ExecStartPre=-+{told.format('up')}" in fenced
    assert f"ExecStopPost=-+{told.format('down')}" in fenced
    alone = release_files_of(plan_of("large"))
    assert not [file for file in alone if "cluster" in file.path]


def test_a_named_network_needs_no_rdma_and_is_then_plain_tcp() -> None:
    found = {host: Ports((dataclasses.replace(LAN, addresses=(f"10.1.0.{number}/16",)),))
             for number, host in enumerate(PAIR, 1)}  # fmt: skip
    release = plan_on("spark-1", found, clustered(subnet="10.1.0.0/16")).serve
    assert release.cluster.head.address == "10.1.0.1"
    assert release.cluster.head.docker_args == ()
    assert release.cluster.head.env["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_HCA" not in release.cluster.head.env


def test_a_host_without_a_cable_is_named_with_what_it_has() -> None:
    bare = Ports((LAN, Port("enp1s0f0np0", False, 1500, None, (), None, None)))
    with pytest.raises(PlanError) as caught:
        plan_on("spark-1", {**FABRIC, "spark-2": bare})
    text = str(caught.value)
    assert "spark-2: cluster" in text
    assert "enp1s0f0np0 down without address" in text
    assert "cluster.subnet" in text


def moved(ports: tuple[Port, ...], *addresses: str) -> tuple[Port, ...]:
    """Return ports with these addresses, in the order of those that are up."""
    given = iter(addresses)
    return tuple(
        dataclasses.replace(one, addresses=(next(given),)) if one.up else one for one in ports
    )


@pytest.mark.parametrize(
    ("second", "told"),
    [
        # The cable in the network of the hosts: it would be served over the slow one, unnoticed.
        (moved((LAN, *of_cable(0, 11)), "192.168.100.2/24", "192.168.100.11/24",
               "192.168.101.11/24"),
         "spark-2: enp1s0f0np0: 192.168.100.0/24 is also the network of enP7s7"),
        (moved((LAN, *of_cable(0, 11)), "192.168.1.2/24", "192.168.100.11/24",
               "192.168.100.12/24"),
         "spark-2: enP2p1s0f0np0: 192.168.100.0/24 is also the network of enp1s0f0np0"),
        # One machine under two names, or an address given twice.
        ((LAN, *of_cable(1, 10)), "spark-2: cluster: has 192.168.100.10"),
    ],
)  # fmt: skip
def test_networks_in_which_packets_could_arrive_elsewhere_are_refused(
    second: tuple[Port, ...], told: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan_on("spark-1", {**FABRIC, "spark-2": Ports(second)})
    assert told in str(caught.value)


def test_every_release_has_ports_of_its_own_within_the_range() -> None:
    base = clustered()
    watch = dataclasses.replace(base.watch, interval_s=base.watch.interval_s + 1)
    other = dataclasses.replace(base, watch=watch)
    first, second = (plan_on("spark-1", FABRIC, s).serve.cluster for s in (base, other))
    assert first.port != second.port
    for one in (first, second):
        assert 29500 <= one.port < one.proven_port < 31500


def test_a_plan_made_without_the_hosts_says_what_is_still_open() -> None:
    release = plan_on("spark-1", {}).serve
    assert "ADDRESS-OF-spark-1" in release.cluster.members[1].argv


def test_two_hosts_hold_half_of_the_weights_each_and_more_cache() -> None:
    alone, both = plan_of("large").memory, plan_on("spark-1", FABRIC).memory
    # Routers and vision stay whole.
    assert 0.5 < both.weights_bytes / alone.weights_bytes < 0.55
    assert both.kv_tokens > 2 * alone.kv_tokens


@pytest.mark.parametrize(("count", "fits"), [(1, False), (2, False), (4, True)])
def test_the_397b_needs_four_hosts_and_says_so(count: int, fits: bool) -> None:
    hosts = tuple(f"spark-{number}" for number in range(count)) if count > 1 else ()
    settings = dataclasses.replace(
        Settings(), model="qwen3.5-397b", cluster=ClusterSettings(hosts=hosts)
    )
    problems = problems_of(settings, shipped_catalog())
    assert not problems if fits else "or 4 hosts that serve it together" in str(problems[0])


def test_what_cannot_be_cut_evenly_is_refused_with_what_could() -> None:
    three = dataclasses.replace(Settings(), cluster=ClusterSettings(hosts=("a", "b", "c")))
    problem = problems_of(three, shipped_catalog())[0]
    assert problem.where == "cluster.hosts"
    assert "2 KV heads" in problem.what
    assert problem.fix == "use 2 or 4 hosts"


def test_experts_of_one_group_on_a_rank_are_refused() -> None:
    eight = dataclasses.replace(Settings(), cluster=ClusterSettings(hosts=tuple("abcdefgh")))
    assert "experts-of-one-group" in str(problems_of(eight, shipped_catalog())[0])


def test_prefixes_on_two_hosts_of_the_397b_are_refused() -> None:
    catalog = shipped_catalog()
    wide = dataclasses.replace(Settings().memory, total_gib=400)
    pair = dataclasses.replace(
        Settings(), model="qwen3.5-397b", profile="agent", memory=wide,
        cluster=ClusterSettings(hosts=PAIR),
    )  # fmt: skip
    assert "prefixes-on-a-pair-of-397b" in str(problems_of(pair, catalog)[0])
    four = dataclasses.replace(pair, cluster=ClusterSettings(hosts=(*PAIR, "c", "d")))
    assert not problems_of(four, catalog)


@pytest.mark.parametrize(
    "option", [{"tensor-parallel-size": 2}, {"nnodes": 2}, {"pipeline-parallel-size": 2}]
)
def test_how_the_engine_spreads_is_decided_by_the_hosts_alone(option: dict[str, int]) -> None:
    base = Settings(cluster=ClusterSettings(hosts=PAIR))
    chosen = dataclasses.replace(base, engine=dataclasses.replace(base.engine, options=option))
    assert "one-gpu-in-a-host" in str(problems_of(chosen, shipped_catalog())[0])


def test_a_cluster_on_ray_is_refused_with_what_to_use_instead() -> None:
    base = Settings(cluster=ClusterSettings(hosts=PAIR))
    option = {"distributed-executor-backend": "ray"}
    chosen = dataclasses.replace(base, engine=dataclasses.replace(base.engine, options=option))
    [problem] = problems_of(chosen, shipped_catalog())
    assert "guard rail ray: the engine's image has no Ray" in problem.what
    assert "cluster.hosts" in problem.fix


@pytest.mark.parametrize(
    ("version", "refused"),
    [("2.28.9", True), ("2.29.2", True), ("2.29.3", False), ("2.29.30", False), ("2.30.4", False)],
)
def test_a_library_that_is_known_to_wedge_fails_the_proof(version: str, refused: bool) -> None:
    line = f"INFO 11-22 [pynccl.py:148] vLLM is using nccl=={version}"
    both, alone = plan_on("spark-1", FABRIC).serve.check, plan_of("large").serve.check
    assert any(re.search(one, line) for one in both.log_forbidden) is refused
    assert not any(re.search(one, line) for one in alone.log_forbidden)
