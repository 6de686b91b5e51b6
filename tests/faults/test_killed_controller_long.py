"""Controllers killed in what takes longer (an image, measuring, going back), and further phases."""

from __future__ import annotations

import time

import pytest

from tests.faults.hold import Hold, controller, die
from tests.faults.test_killed_controller import (
    kill_by_turns,
    kill_in_a_phase,
    kill_in_the_middle_of_a_job,
)
from tests.host.conftest import Fleet
from tests.labkit import lab

LONG_JOBS = ["image-build"]
MEASURES, GOES_BACK = LONG_PHASES = ["bench", "rollback"]
FURTHER_PHASES = ["prove", "stop", "memory", "enable"]


def test_killed_in_the_middle_of_an_image_build(fleet: Fleet) -> None:
    # What serves here is pulled; the image of the real engine is built beside it, maybe after
    # its base of hundreds of megabytes has come.
    fleet.settle(fleet.guests[0])
    lab("prepare", "--engine", "cpu")
    fleet.site.choose(keep_ready=[{"model": "lab-tiny", "profile": "v2"}])
    kill_in_the_middle_of_a_job(fleet, LONG_JOBS[0], seconds=400)


@pytest.mark.parametrize("phase", FURTHER_PHASES)
def test_killed_in_a_further_phase_of_the_change(fleet: Fleet, phase: str) -> None:
    kill_by_turns(fleet, phase)


def test_killed_while_the_host_measures(fleet: Fleet) -> None:
    fleet.settle(fleet.guests[0])
    # Only what was never measured is.
    never = {"environment": {"STUB_LOG": f"never measured {time.time()}"}}
    kill_in_a_phase(fleet, MEASURES, engine=never)


def test_killed_while_the_host_goes_back(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    before = guest.serving()
    fleet.site.choose(engine={"environment": {"STUB_FAULT": "garbage"}}, check={"timeout_s": 10})
    with Hold.switch(guest, GOES_BACK) as hold, controller(fleet) as process:
        held = hold.wait()

        die(process)

        result = guest.json(f"cat /var/lib/spark/switch/{held['release']}.json")
        assert (result["phase"], result["state"]) == (GOES_BACK, "running")
        assert guest.boots() == before
    guest.wait(f"systemctl is-failed {held['unit']}")
    result = guest.json(f"cat /var/lib/spark/switch/{held['release']}.json")
    assert result["state"] == "rolled-back"
    assert guest.serving() == guest.boots() == before
    assert guest.answers("What is the capital of France?", "Paris")
    fleet.settle(guest)
    fleet.site.deploy("--limit", guest.name).must_have_changed_nothing()
