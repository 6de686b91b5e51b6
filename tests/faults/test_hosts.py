"""Hosts are independent: one that is down or fails harms no other."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.faults.bench import HOST
from tests.host.conftest import Fleet
from tests.labkit import lab

# Every change of release that was tried, also one tried again under the same name.
SWITCHES = "find /var/lib/spark/switch -printf '%p %s %T@\\n' | sort"


def test_a_host_that_is_down_does_not_stop_the_other_and_the_run_is_red(fleet: Fleet) -> None:
    fleet.settle()
    down, up = fleet.guests
    fleet.site.choose(serve={"names": ["renamed"]})

    lab("break", "host-down", down.name)
    try:
        run = fleet.site.deploy()
    finally:
        lab("break", "host-down", down.name, "--heal")

    assert run.exit_code != 0
    assert up.names() == ["renamed"]
    down.wait("true", seconds=60)
    assert down.names() != ["renamed"]
    again = fleet.site.deploy()
    assert again.exit_code == 0, again.stderr[-3000:]
    assert down.names() == ["renamed"]


def test_a_failing_change_stops_before_the_next_host(fleet: Fleet) -> None:
    fleet.settle()
    before = [guest.serving() for guest in fleet.guests]
    failing, spared = [guest.run(SWITCHES) for guest in fleet.guests]

    fleet.site.choose(engine={"environment": {"STUB_FAULT": "garbage"}})
    run = fleet.site.deploy()

    assert run.exit_code != 0
    assert [guest.serving() for guest in fleet.guests] == before
    assert "left alone" in run.stderr
    assert fleet.guests[0].run(SWITCHES) != failing
    assert fleet.guests[1].run(SWITCHES) == spared


def test_what_is_served_is_replaced_host_by_host_the_canary_first(fleet: Fleet) -> None:
    fleet.settle()
    fleet.site.choose(serve={"names": ["once"]}, rollout={"canary": fleet.guests[1].name})
    assert fleet.site.deploy().exit_code == 0
    (second, _), (_, canary) = (guest.changes()[-1] for guest in fleet.guests)
    assert canary < second


def test_as_many_hosts_as_settings_say_are_replaced_at_once(fleet: Fleet) -> None:
    fleet.settle()
    fleet.site.choose(serve={"names": ["both"]}, rollout={"at_once": "all"})
    run = fleet.site.deploy()
    assert run.exit_code == 0, run.stderr[-3000:]
    (began, ended), (other_began, other_ended) = (guest.changes()[-1] for guest in fleet.guests)
    assert max(began, other_began) < min(ended, other_ended)


def test_a_power_cut_while_the_candidate_loads_boots_the_old_release(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    before = guest.serving()
    fleet.site.choose(engine={"environment": {"STUB_LOAD_S": "60"}})
    process = fleet.site.start("--limit", guest.name)
    release = wait_for_its_start(process)
    begun = guest.json(f"cat /var/lib/spark/switch/{release}.json")
    assert (begun["phase"], begun["state"]) == ("start", "running")

    lab("break", "kill-guest", guest.name)
    process.terminate()
    process.wait(timeout=60)
    lab("up", guest.name)

    guest.wait(f"systemctl is-active {before[0]}", seconds=90)
    assert guest.serving() == before
    assert guest.json(f"{HOST} switch-poll {release}")["state"] == "interrupted"
    assert guest.ask("What is the capital of France?")[0] == 200
    # Taking the choice back changes nothing: no step of the broken change is left to undo.
    fleet.settle().must_have_changed_nothing()


def wait_for_its_start(process: subprocess.Popen[str]) -> str:
    """Read what a deploy says until a candidate loads; return the candidate's name."""
    said = []
    for line in process.stdout or ():
        said.append(line)
        found = re.search(r"rollout of (main-[0-9a-f]{12}): start: ", line)
        if found:
            return found[1]
    pytest.fail(f"no candidate ever loaded:\n{''.join(said)[-4000:]}")
