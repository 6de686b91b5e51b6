"""Where a host has several services, one engine starts at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from spark_contract.documents import parse
from spark_contract.paths import Paths
from spark_contract.release import Release
from spark_host.engine.serve import wait_for_turn
from spark_host.system import ports

from tests.unit.host_tools.stub_host import release_data

CHAT, EMBED = "main-0123456789ab", "embed-0123456789ab"


@dataclass
class Systemd:
    """What systemd says of units, and after how many questions another state holds."""

    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    then: dict[int, dict[str, tuple[str, str]]] = field(default_factory=dict)
    asked: int = 0

    def show(self, units: list[str], properties: list[str]) -> dict[str, dict[str, str]]:
        assert properties == ["ActiveState", "SubState"]
        self.asked += 1
        self.states |= self.then.get(self.asked, {})
        found = {one: self.states.get(one, ("inactive", "dead")) for one in units}
        return {one: dict(zip(properties, state, strict=True)) for one, state in found.items()}


@dataclass
class Clock:
    seconds: float = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def machine(tmp_path):
    paths = Paths(tmp_path)
    paths.run.mkdir(parents=True)
    return ports.Host(paths, units=Systemd(), clock=Clock())


def release(name: str) -> Release:
    service = name.rpartition("-")[0]
    return parse(Release, json.dumps(release_data(name, service=service)))


def test_who_comes_second_waits_until_the_first_has_started(machine):
    said: list[str] = []
    wait_for_turn(release(CHAT), machine, said.append)
    chat = f"spark-serve@{CHAT}.service"
    machine.units.states[chat] = ("activating", "start-post")
    machine.units.then[3] = {chat: ("active", "running")}
    wait_for_turn(release(EMBED), machine, said.append)
    assert said == [f"phase=turn waiting for the start of {CHAT}"] * 2


@pytest.mark.parametrize(
    "state", [("failed", "failed"), ("activating", "auto-restart"), ("inactive", "dead")]
)
def test_a_start_that_failed_or_rests_holds_nobody_up(machine, state):
    said: list[str] = []
    wait_for_turn(release(CHAT), machine, said.append)
    machine.units.states[f"spark-serve@{CHAT}.service"] = state
    wait_for_turn(release(EMBED), machine, said.append)
    assert said == []


def test_a_start_that_never_ends_is_not_waited_for_longer_than_a_start_may_take(machine):
    said: list[str] = []
    wait_for_turn(release(CHAT), machine, said.append)
    machine.units.states[f"spark-serve@{CHAT}.service"] = ("activating", "start")
    mine = release(EMBED)
    wait_for_turn(mine, machine, said.append)
    assert said[-1] == f"phase=turn no longer waiting for the start of {CHAT}"
    assert mine.timeouts.start_s < machine.clock.seconds < mine.timeouts.start_s + 5


def test_the_same_release_takes_its_own_turn_again(machine):
    said: list[str] = []
    wait_for_turn(release(CHAT), machine, said.append)
    machine.units.states[f"spark-serve@{CHAT}.service"] = ("activating", "start-pre")
    wait_for_turn(release(CHAT), machine, said.append)
    assert said == []
