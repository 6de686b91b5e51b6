"""A controller that dies anywhere leaves work that the next run finishes.

Every kill falls at a point that the host's own systemd and files confirm: the work is stopped
there (SIGSTOP), looked at, the controller is killed, and only then the work goes on.
"""

from __future__ import annotations

import time

import pytest

from tests.faults.hold import JOBS, Hold, attach, controller, die, next_runs
from tests.host.conftest import USUAL, Fleet
from tests.labkit import lab

# Prints something once a job's proof is there.
IS_PROVEN = {
    "fetch": "ls {receipt}",
    "checkpoint": "ls {receipt}",
    "image-pull": "docker images -q {image}",
    "image-build": "docker images -q {image}",
}
# What makes the job necessary.
FORGET = {
    "fetch": "rm -rf /srv/spark/models/* /srv/spark/sources/*",
    "checkpoint": "rm -rf /srv/spark/models/* /srv/spark/sources/*",
    "image-pull": "systemctl stop 'spark-serve@*'; "
    "docker rmi -f $(docker images -q '10.77.0.1:5000/*/stub*')",
    "image-build": "docker rmi -f $(docker images -q spark-vllm)",
}
GOES_BACK = "rollback"  # the phase of a change that failed
PHASES = ["prove", "drain", "stop", "memory", "start", "check", "open", "enable", "bench"]


@pytest.mark.parametrize("kind", JOBS)
def test_killed_in_the_middle_of_a_job(fleet: Fleet, kind: str) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    guest.run(FORGET[kind], check=False)
    if kind == "image-build":
        # What serves here is pulled; the image of the real engine is built beside it.
        lab("prepare", "--engine", "cpu")
        fleet.site.choose(keep_ready=[{"model": "lab-tiny", "profile": "v2"}])
    # A base image of hundreds of megabytes may come before the build.
    with Hold.job(guest, kind, JOBS[kind], seconds=400) as hold, controller(fleet) as process:
        held = hold.wait(420)

        die(process)

        def starts() -> str:
            return guest.run(f"journalctl -u {held['unit']} -o cat | grep -c ^Starting")

        running, begun = guest.unit(held["unit"], "ActiveState", "SubState"), starts()
        assert running == {"ActiveState": "activating", "SubState": "start"}
        assert guest.run(IS_PROVEN[kind].format(**held["proof"]) + " 2>/dev/null || :") == ""
        attach(fleet, hold)
    assert starts() == begun  # attached to, not begun again
    assert fleet.site.deploy("--limit", guest.name).changed == []


@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_each_phase_of_the_change(fleet: Fleet, phase: str) -> None:
    guest = fleet.guests[0]
    # There and back again by turns: each phase begins where the one before it ended.
    [unit] = guest.serving()
    release = unit.removeprefix("spark-serve@").removesuffix(".service")
    profile = guest.json(f"cat /etc/spark/releases/{release}/release.json")["profile"]
    fleet.site.choices.clear()
    fleet.site.choose(**{**USUAL, "profile": "v2" if profile == "v2-tq" else "v2-tq"})
    if phase == "bench":  # only what was never measured is
        fleet.site.choose(engine={"environment": {"STUB_LOG": f"never measured {time.time()}"}})
    with Hold.switch(guest, phase) as hold, controller(fleet) as process:
        held = hold.wait()

        die(process)

        result = guest.json(f"cat /var/lib/spark/switch/{held['release']}.json")
        assert (result["phase"], result["state"]) == (phase, "running")
        assert guest.unit(held["unit"], "ActiveState") == {"ActiveState": "activating"}
    next_runs(fleet)
    assert guest.serving() == guest.boots() == [f"spark-serve@{held['release']}.service"]
    assert guest.answers("What is the capital of France?", "Paris")


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
    assert fleet.site.deploy("--limit", guest.name).changed == []
