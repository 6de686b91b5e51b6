"""A controller that dies anywhere leaves work that the next run finishes.

Every kill falls at a point that the host's own systemd and files confirm: the work is stopped
there (SIGSTOP), looked at, the controller is killed, and only then the work goes on.
"""

from __future__ import annotations

import pytest

from tests.faults.hold import JOBS, Hold, attach, controller, die, next_runs
from tests.host.conftest import USUAL, Fleet

# Prints something once a job's proof is there.
IS_PROVEN = {
    "fetch": "ls {receipt}",
    "checkpoint": "ls {receipt}",
    "image-pull": "docker images -q {image}",
}
PHASES = ["prove", "drain", "stop", "memory", "start", "check", "open", "enable"]


@pytest.mark.parametrize("kind", JOBS)
def test_killed_in_the_middle_of_a_job(fleet: Fleet, kind: str) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    guest.run("rm -rf /srv/spark/models/* /srv/spark/sources/*")
    if kind == "image-pull":
        guest.run(
            "systemctl stop 'spark-serve@*'; "
            "docker rmi -f $(docker images -q '10.77.0.1:5000/*/stub*')",
            check=False,
        )
    with Hold.job(guest, kind, JOBS[kind]) as hold, controller(fleet) as process:
        held = hold.wait()

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
    with Hold.switch(guest, phase) as hold, controller(fleet) as process:
        held = hold.wait()

        die(process)

        result = guest.json(f"cat /var/lib/spark/switch/{held['release']}.json")
        assert (result["phase"], result["state"]) == (phase, "running")
        assert guest.unit(held["unit"], "ActiveState") == {"ActiveState": "activating"}
    next_runs(fleet)
    assert guest.serving() == guest.boots() == [f"spark-serve@{held['release']}.service"]
    assert guest.answers("What is the capital of France?", "Paris")
