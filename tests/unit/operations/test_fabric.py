import json
from dataclasses import replace

import pytest
from spark_contract.status import SpeedResult
from spark_contract.tool import ERROR

from spark_deploy.hosts import fabric
from spark_deploy.hosts.fabric import check_links, check_speed, find_cluster_problems
from spark_deploy.plan.types import FabricLink
from tests.unit.operations.fake_host import Failed, FakeHost, describe, on
from tests.unit.preflight.surveyed import survey

LINK = FabricLink("fab0", "roce0", 9000, 200000, "spark-2", "192.168.100.12", 9000)
TWIN = FabricLink("fab1", "roce1", 9000, 200000, "spark-2", "192.168.101.12", 9000)
REACHED = {LINK.address: "yes", TWIN.address: "yes"}


@pytest.mark.parametrize(
    ("links", "reached", "problems", "warnings"),
    [
        ((LINK, TWIN), REACHED, [], []),
        ((LINK, TWIN), {**REACHED, TWIN.address: "no"},
         ["fab1: spark-2 (192.168.101.12) does not reply to 9000-byte packets"], []),
        ((replace(LINK, other_mtu=1500), TWIN), REACHED,
         ["fab0: the MTU is 9000 here, but 1500 on"], []),
        ((replace(LINK, speed_mbit_per_s=100000), TWIN), REACHED, [],
         ["the link runs at 100 Gb/s instead of 200 Gb/s"]),
        ((replace(LINK, mtu=1500, other_mtu=1500), TWIN), REACHED, [], ["MTU 1500"]),
        ((LINK,), {}, [], ["ping is missing", "halves the speed"]),
    ],
)  # fmt: skip
def test_preflight_reports_faulty_and_slow_fabric_links(links, reached, problems, warnings):
    verdict = check_links("spark-1", links, reached)
    for messages, patterns in ((verdict.problems, problems), (verdict.warnings, warnings)):
        assert len(messages) == len(patterns)
        for problem, pattern in zip(messages, patterns, strict=True):
            assert pattern in str(problem)


def test_cluster_members_need_the_same_driver_branch():
    first, second, newer = (
        survey(smi=[f"NVIDIA GB10, {version}", "rc=0"])
        for version in ("580.142", "580.95", "590.44")
    )
    assert list(find_cluster_problems(("a", "b"), {"a": first, "b": second})) == []
    [problem] = find_cluster_problems(("a", "b"), {"a": first, "b": newer, "c": second})
    assert problem.what == "different branches: a 580, b 590"
    assert list(find_cluster_problems(("a",), {"a": first, "b": newer})) == []


def test_reports_kernels_that_reserve_memory_for_kexec():
    good = survey()
    memory = replace(good.memory, cma_total_bytes=0, cma_free_bytes=9 << 30)
    [problem] = find_cluster_problems(("a", "b"), {"a": replace(good, memory=memory), "b": good})
    assert problem.where == "a: kernel"
    assert "kho=off" in problem.fix


@pytest.mark.parametrize(
    ("link_mbit_per_s", "gbit_per_s", "problem", "warning"),
    [
        (200000, 88.0, "", ""),
        (200000, 26.0, "", ""),
        (200000, 13.2, "", "degraded port reportedly reaches only 13"),
        (200000, 0.94, "0.9 of 200 Gb/s", ""),
        (10000, 9.4, "", ""),
        (10000, 0.94, "0.9 of 10 Gb/s", ""),
        (1000, 0.94, "", ""),
        (None, 0.94, "", ""),
        (None, 0.0, "full-size packets do not reach spark-2", ""),
    ],
)
def test_short_speed_test_reports_slow_links(link_mbit_per_s, gbit_per_s, problem, warning):
    link = replace(LINK, speed_mbit_per_s=link_mbit_per_s)
    verdict = check_speed("spark-1", link, SpeedResult(int(gbit_per_s * 125e6), 1.0))
    assert [problem in message.what for message in verdict.problems] == [True] * bool(problem)
    assert [warning in message.what for message in verdict.warnings] == [True] * bool(warning)


def cable_end(gbit_per_s=0, error="", rdma=None):
    result = {"schema_version": 1, "arrived_bytes": int(gbit_per_s * 125e6), "took_s": 1.0}

    def shell(script):
        if "ib_write_bw" in script:
            return Failed() if rdma is None else rdma
        return Failed(error) if error else json.dumps(result)

    return FakeHost(shell=shell)


def measure(monkeypatch, sender, listener, executing=True, reached="yes"):
    monkeypatch.setattr(fabric, "read_fact", lambda fact, **_: {LINK.address: reached})
    hosts = {"spark-1": sender, "spark-2": listener}
    with on(sender, executing) as state:
        state.inventory.get_host = hosts.__getitem__
        return [describe(command) for command in fabric.measure_links._inner([LINK])]


def orders(host):
    tests = [
        (script, options["_stdin"])
        for script, options in host.commands
        if "ib_write_bw" not in script
    ]
    return [(script, json.loads(request)) for script, request in tests]


def test_measurement_token_is_not_in_process_lists(monkeypatch):
    sender, listener = cable_end(88), cable_end()
    for _ in range(2):
        assert measure(monkeypatch, sender, listener) == []
    (send, request), (_, second) = orders(sender)
    listen, same = orders(listener)[0]
    assert request == same
    assert len(request["token"]) == 32
    assert request["token"] != second["token"]
    assert request["token"] not in send + listen
    assert request["max_bytes"] <= 10**9
    assert "DynamicUser=yes" in listen
    assert "RuntimeMaxSec=" in listen
    assert "fab0 to spark-2 (192.168.100.12): 88.0 Gb/s over TCP" in sender.log_text


def test_fabric_speed_dry_run_sends_no_traffic(monkeypatch):
    sender, listener = cable_end(88), cable_end()
    assert measure(monkeypatch, sender, listener, executing=False) == []
    assert not sender.commands + listener.commands


@pytest.mark.parametrize(
    ("sender", "listener", "reached", "message"),
    [
        (cable_end(0.9), cable_end(), "yes", "0.9 of 200 Gb/s"),
        (cable_end(88), cable_end(), "no", "does not reply to 9000-byte packets"),
        (cable_end(error="x"), cable_end(error=f"{ERROR}fab0:20000: cannot listen; fix: y"),
         "yes", "cannot listen"),
        (cable_end(error=f"{ERROR}fab0: no connection; fix: y"), cable_end(),
         "yes", "no connection"),
    ],
)  # fmt: skip
def test_fabric_measurement_fails_on_a_faulty_link(monkeypatch, sender, listener, reached, message):
    [refusal] = measure(monkeypatch, sender, listener, reached=reached)
    assert message in refusal


PERFTEST = """
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      35300            0.00               RATE   		     0.176505
---------------------------------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("tcp", "sender_rdma", "listener_rdma", "logged", "degraded"),
    [
        (13.2, None, "", "install perftest", True),
        (20, "92.54", "", "92.5 Gb/s RDMA", False),
        (88, "13.10", "", "13.1 Gb/s arrive at spark-2", True),
        (88, "", None, "install perftest", False),
        (88, "malformed", "", "ib_write_bw failed", False),
    ],
)
def test_fabric_measurement_uses_rdma_if_perftest_is_installed(
    monkeypatch, tcp, sender_rdma, listener_rdma, logged, degraded
):
    sender = cable_end(tcp, rdma=sender_rdma and PERFTEST.replace("RATE", sender_rdma))
    listener = cable_end(rdma=listener_rdma)
    assert measure(monkeypatch, sender, listener) == []
    assert logged in sender.log_text
    assert ("reportedly reaches only 13" in sender.log_text) is degraded
    if sender_rdma:
        [*_, (listen, _)], [*_, (send, _)] = listener.commands, sender.commands
        assert "--bind_source_ip 192.168.100.12" in listen
        assert "DynamicUser=yes" in listen
        assert "192.168.100.12 && exit" in send
