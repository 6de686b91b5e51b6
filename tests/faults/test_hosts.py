"""Hosts are independent, and a rollout replaces them in the configured order."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.faults.bench import SPARK_HOST
from tests.host.conftest import Fleet
from tests.labkit import lab


def test_replaces_hosts_one_by_one_starting_with_canary(fleet: Fleet) -> None:
    fleet.settle()
    fleet.site.choose(serve={"names": ["once"]}, rollout={"canary": fleet.guests[1].name})
    assert fleet.site.deploy().exit_code == 0
    (second, _), (_, canary) = (guest.rollout_times()[-1] for guest in fleet.guests)
    assert canary < second


def test_replaces_configured_number_of_hosts_at_once(fleet: Fleet) -> None:
    fleet.settle()
    fleet.site.choose(serve={"names": ["both"]}, rollout={"at_once": "all"})
    run = fleet.site.deploy()
    assert run.exit_code == 0, run.stderr[-3000:]
    (began, ended), (other_began, other_ended) = (
        guest.rollout_times()[-1] for guest in fleet.guests
    )
    assert max(began, other_began) < min(ended, other_ended)


def test_power_cut_while_candidate_loads_boots_old_release(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    before = guest.serving()
    fleet.site.choose(engine={"environment": {"STUB_LOAD_S": "60"}})
    process = fleet.site.start("--limit", guest.name)
    release = wait_for_candidate_start(process)
    result = guest.json(f"cat /var/lib/spark/switch/{release}.json")
    assert (result["phase"], result["state"]) == ("start", "running")

    lab("break", "kill-guest", guest.name)
    process.terminate()
    process.wait(timeout=60)
    lab("up", guest.name)

    guest.wait(f"systemctl is-active {before[0]}", seconds=90)
    assert guest.serving() == before
    assert guest.json(f"{SPARK_HOST} switch-poll {release}")["state"] == "interrupted"
    assert guest.answers()
    # Reverting the setting changes nothing: no step of the rollout is left to undo.
    fleet.settle().assert_unchanged()


def wait_for_candidate_start(process: subprocess.Popen[str]) -> str:
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        started = re.search(r"rollout of (main-[0-9a-f]{12}): start: ", line)
        if started:
            return started[1]
    pytest.fail(f"no candidate ever loaded:\n{''.join(lines)[-4000:]}")
