"""The network between members of a cluster is refused or warned of in words that say what to do."""

from __future__ import annotations

import dataclasses

import pytest
from spark_contract.fabric import SpeedFound

from spark_deploy.hosts.fabric import describe_speed, find_differences, judge_links, judge_speed
from spark_deploy.plan.cluster import ways
from spark_deploy.plan.types import Way
from tests.unit.planning.test_cluster import FABRIC, clustered
from tests.unit.preflight.surveyed import survey

ONE = Way("enp1s0f1np1", "rocep1s0f1", 9000, 200000, "spark-2", "192.168.100.11", 9000)
TWIN = Way("enP2p1s0f1np1", "roceP2p1s0f1", 9000, 200000, "spark-2", "192.168.101.11", 9000)
BOTH = {ONE.address: "yes", TWIN.address: "yes"}


def test_both_rails_of_a_cable_are_ways_to_the_other_member() -> None:
    found = ways(clustered(), "spark-1", FABRIC)
    assert {(one.interface, one.host, one.address) for one in found} == {
        ("enp1s0f1np1", "spark-2", "192.168.100.11"),
        ("enP2p1s0f1np1", "spark-2", "192.168.101.11"),
    }


def test_a_sound_fabric_is_passed_without_a_word() -> None:
    verdict = judge_links("spark-1", (ONE, TWIN), BOTH)
    assert (verdict.problems, verdict.warnings) == ((), ())


def test_a_rail_that_large_packets_do_not_pass_is_refused() -> None:
    verdict = judge_links("spark-1", (ONE, TWIN), {**BOTH, TWIN.address: "no"})
    [problem] = verdict.problems
    assert problem.where == "spark-1: enP2p1s0f1np1"
    assert "no packet of 9000 bytes comes back from spark-2" in problem.what


def test_two_mtus_on_one_cable_are_refused() -> None:
    [problem] = judge_links("a", (dataclasses.replace(ONE, other_mtu=1500), TWIN), BOTH).problems
    assert "MTU 9000, but 1500 on spark-2" in problem.what


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (dataclasses.replace(ONE, speed_mbit_per_s=100000), "linked at 100 Gb/s of 200"),
        (dataclasses.replace(ONE, mtu=1500, other_mtu=1500), "MTU 1500"),
    ],
)
def test_what_only_costs_speed_is_a_warning(way: Way, words: str) -> None:
    verdict = judge_links("a", (way, TWIN), BOTH)
    assert not verdict.problems
    assert [words in warning.what for warning in verdict.warnings] == [True]


def test_half_of_a_cable_and_a_host_without_ping_are_warned_of() -> None:
    verdict = judge_links("a", (ONE,), {})
    assert not verdict.problems
    assert "no ping" in verdict.warnings[0].what
    assert "half of the cable's speed" in verdict.warnings[1].what


def test_members_of_one_driver_branch_are_alike() -> None:
    one, other, third = (
        survey(smi=[f"NVIDIA GB10, {version}", "rc=0"])
        for version in ("580.142", "580.95", "590.44")
    )
    assert list(find_differences(("a", "b"), {"a": one, "b": other})) == []
    [problem] = find_differences(("a", "b"), {"a": one, "b": third, "c": other})
    assert problem.what == "different branches: a 580, b 590"
    assert list(find_differences(("a",), {"a": one, "b": third})) == []


def test_a_kernel_that_keeps_memory_for_its_handover_is_refused_in_a_cluster() -> None:
    one = survey()
    memory = dataclasses.replace(one.memory, cma_total_bytes=0, cma_free_bytes=9 << 30)
    [problem] = find_differences(
        ("a", "b"), {"a": dataclasses.replace(one, memory=memory), "b": one}
    )
    assert problem.where == "a: kernel"
    assert "kho=off" in problem.fix


def carried(gbit_per_s: float) -> SpeedFound:
    return SpeedFound(int(gbit_per_s * 125e6), 1.0)


@pytest.mark.parametrize(
    ("stated_mbit_per_s", "gbit_per_s", "problem", "warning"),
    [
        (200000, 88.0, "", ""),
        (200000, 26.0, "", ""),  # what python alone may reach: nothing is known against it
        (200000, 13.2, "", "degraded port is reported to carry 13"),
        (200000, 0.94, "0.9 Gb/s to spark-2 over a link of 200", ""),
        (10000, 9.4, "", ""),
        (10000, 0.94, "0.9 Gb/s to spark-2 over a link of 10", ""),
        (1000, 0.94, "", ""),
        (None, 0.94, "", ""),
        (None, 0.0, "no packet of full size gets to spark-2", ""),
    ],
)
def test_a_short_test_finds_slow_ways_and_does_not_say_what_it_cannot_know(
    stated_mbit_per_s: int | None, gbit_per_s: float, problem: str, warning: str
) -> None:
    way = dataclasses.replace(ONE, speed_mbit_per_s=stated_mbit_per_s)
    verdict = judge_speed("spark-1", way, carried(gbit_per_s))
    assert [problem in one.what for one in verdict.problems] == [True] * bool(problem)
    assert [warning in one.what for one in verdict.warnings] == [True] * bool(warning)


def test_the_figure_stands_beside_what_the_link_says() -> None:
    told = describe_speed(ONE, SpeedFound(10**9, 0.1))
    assert told.endswith("80.0 Gb/s over TCP (1000 MB in 0.10 s; link 200 Gb/s)")
    unknown = dataclasses.replace(ONE, speed_mbit_per_s=None)
    assert "link of unknown speed" in describe_speed(unknown, SpeedFound(10**9, 0.1))
