"""Timers of a schedule on a host, and deploys that leave alone what their time changed to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_deploy.hosts import gateway, serve
from spark_deploy.hosts.gateway import Calendars, Timers
from spark_deploy.plan.types import FileState, ManagedFile
from tests.unit.facts.test_serve_status import RELEASE, RIGHT
from tests.unit.operations.test_operations import FakeHost, outcome, state_of
from tests.unit.statuses import told

NAME = "spark-hours@main-aaaaaaaaaaaa.timer"
OLD = "spark-hours@main-bbbbbbbbbbbb.timer"
TIMER = ManagedFile(f"/etc/systemd/system/{NAME}", b"[Timer]\n")
HERE = state_of(TIMER)
PLAN: Any = SimpleNamespace(name="main-cccccccccccc", service="main", cluster=None)
NIGHT: Any = SimpleNamespace(name=RELEASE, service="main")


def changed(
    timers: dict[str, bool], files: dict[str, FileState], wanted: list[ManagedFile], bad: str = ""
) -> tuple[FakeHost, list[str]]:
    host = FakeHost(Timers=timers, FileStates=files, Calendars=bad)
    return host, outcome(host, gateway.set_timers, ["20:00"] if wanted else [], wanted)


def test_a_new_timer_is_placed_enabled_and_started() -> None:
    _, commands = changed({}, {}, [TIMER])
    assert len(commands) == 2
    assert f"systemctl enable {NAME} && systemctl restart {NAME}" in commands[1]


def test_timers_that_run_as_wanted_are_left_alone() -> None:
    host, commands = changed({NAME: True}, {TIMER.path: HERE}, [TIMER])
    assert commands == []
    assert host.noops == ["1 timers run (spark-hours@*.timer)"]


def test_a_timer_that_somebody_stopped_is_started_again() -> None:
    _, commands = changed({NAME: False}, {TIMER.path: HERE}, [TIMER])
    assert len(commands) == 1
    assert f"systemctl restart {NAME}" in commands[0]


def test_timers_of_an_earlier_schedule_go() -> None:
    _, commands = changed({OLD: True}, {}, [])
    assert len(commands) == 1
    assert f"systemctl disable --now {OLD}; rm -f /etc/systemd/system/{OLD};" in commands[0]


def test_a_time_that_the_host_does_not_understand_is_refused_before_anything() -> None:
    _, commands = changed({}, {}, [TIMER], bad=Calendars().process(["25:00"]))
    assert len(commands) == 1
    assert "_refuse(spark-1: schedule: '25:00' is no time" in commands[0]


def test_what_hosts_print_is_read() -> None:
    printed = [f"{NAME} active enabled", f"{OLD} inactive disabled", f"{OLD}x failed enabled", ""]
    assert Timers().process(printed) == {NAME: True, OLD: False, f"{OLD}x": False}
    assert Calendars().process([]) == ""


@pytest.mark.parametrize("judged", ["rolled_out", "proven"])
def test_what_a_time_changed_to_is_left_alone_and_judged_instead(judged: str) -> None:
    status = told(RIGHT)
    assert status.due(PLAN, [NIGHT]) is NIGHT
    if judged == "rolled_out":
        host = FakeHost(Status=status)
        assert outcome(host, serve.roll_out, PLAN, 60, [NIGHT]) == []
        assert host.noops == [f"{RELEASE} is served by schedule"]


def test_without_a_schedule_the_plan_is_what_is_served() -> None:
    host = FakeHost(Status=told(RIGHT))
    assert outcome(host, serve.roll_out, PLAN, 60) == [f"change_now({PLAN.name}, 60)"]


def test_what_its_time_changed_to_but_fails_its_proof_gives_way_to_the_plan() -> None:
    broken = told({**RIGHT, "live": {"ok": False, "release": RELEASE, "detail": "timed out"}})
    assert broken.due(PLAN, [NIGHT]) is PLAN
