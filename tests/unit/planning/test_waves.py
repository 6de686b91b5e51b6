"""Which hosts replace what they serve together, and which wait for them."""

from __future__ import annotations

from typing import Any

import pytest

from spark_deploy.config.settings.service import RolloutSettings
from spark_deploy.plan.cluster import waves_of


def waves(hosts: str, **chosen: Any) -> str:
    """Return waves as ``a b | c``; ``chosen`` are settings that all hosts share."""
    found = waves_of(dict.fromkeys(hosts.split(), RolloutSettings(**chosen)))
    return " | ".join(" ".join(wave) for wave in found)


@pytest.mark.parametrize(
    ("chosen", "expected"),
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
def test_hosts_change_in_waves_after_the_canary(chosen: dict[str, Any], expected: str) -> None:
    assert waves("a b c d e", **chosen) == expected


def test_the_most_careful_host_of_a_wave_says_how_large_it_is() -> None:
    found = waves_of(
        {
            "a": RolloutSettings("all"),
            "b": RolloutSettings("all"),
            "c": RolloutSettings(2),
            "d": RolloutSettings("all"),
            "e": RolloutSettings("all"),
        }
    )
    assert found == (("a", "b"), ("c", "d"), ("e",))


def test_the_members_of_a_cluster_change_together_whatever_is_chosen() -> None:
    alone = dict.fromkeys("abcd", RolloutSettings())
    assert waves_of(alone, [("b", "c"), ("b", "c"), ()]) == (("a",), ("d",), ("b", "c"))
    canary = dict.fromkeys("abcd", RolloutSettings(canary="c"))
    assert waves_of(canary, [("b", "c")]) == (("b", "c"), ("a",), ("d",))


def test_every_host_has_one_turn() -> None:
    assert waves_of({}) == ()
    for at_once in (1, 2, 3, 7, "all"):
        hosts = [f"spark-{n}" for n in range(7)]
        found = waves_of(dict.fromkeys(hosts, RolloutSettings(at_once, "spark-4")))  # type: ignore[arg-type]
        assert sorted(name for wave in found for name in wave) == hosts
