"""A controller that dies anywhere leaves work that the next run finishes.

Every kill falls at a point that the host's own systemd and files confirm: the work is stopped
there (SIGSTOP), looked at, the controller is killed, and only then the work goes on. What takes
longer is in test_killed_controller_long.py, with the phases that are like one of these.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.faults.hold import JOBS, Hold, MissedError, attach, controller, die, next_runs
from tests.faults.killing import DEPLOY, Place, watched
from tests.host.conftest import USUAL, Fleet

pytestmark = pytest.mark.gate

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
QUICK_JOBS = ["fetch", "checkpoint", "image-pull"]
QUICK_PHASES = ["drain", "start", "check", "open"]


@pytest.mark.parametrize("kind", QUICK_JOBS)
def test_killed_in_the_middle_of_a_job(fleet: Fleet, kind: str) -> None:
    def settle_and_kill() -> None:
        fleet.settle(fleet.guests[0])
        kill_in_the_middle_of_a_job(fleet, kind)

    again_when_missed(fleet, settle_and_kill)


@pytest.mark.parametrize("phase", QUICK_PHASES)
def test_killed_in_a_phase_of_the_change(fleet: Fleet, phase: str) -> None:
    kill_by_turns(fleet, phase)


def kill_by_turns(fleet: Fleet, phase: str) -> None:
    """Kill in a phase of the change to the other profile."""

    def there_or_back() -> None:
        # By turns: each phase begins where the one before it ended.
        guest = fleet.guests[0]
        profile = guest.json(f"cat /etc/spark/releases/{guest.release()}/release.json")["profile"]
        kill_in_a_phase(fleet, phase, profile="v2" if profile == "v2-tq" else "v2-tq")

    again_when_missed(fleet, there_or_back)


def again_when_missed(fleet: Fleet, one: Callable[[], None]) -> None:
    """Try one kill, and again where its point was over before it could be held."""
    missed: list[str] = []
    while not in_time(one, missed):
        assert len(missed) < 5, missed
        next_runs(fleet)


def in_time(one: Callable[[], None], missed: list[str]) -> bool:
    try:
        one()
    except MissedError as error:
        missed.append(str(error))
        return False
    return True


def test_killed_in_an_operation_of_the_change(fleet: Fleet) -> None:
    # One point of test_sweep_kill.py, which has them all. The change is one that no test before
    # this one can have made: a choice already on the host leaves the operation nothing to send.
    guest = fleet.guests[0]
    fleet.settle(guest)
    fleet.site.choose(serve={"drain_s": 7})
    at = "Serve_|_Install_units_and_release during 0 0.05 KILL"
    done = watched(Place(guest.name, fleet.site, {}), DEPLOY, {"SPARK_DIE_AT": at})
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    next_runs(fleet)
    assert guest.serving() == guest.boots() == [f"spark-serve@{guest.release()}.service"]
    assert guest.answers("What is the capital of France?", "Paris")


def kill_in_the_middle_of_a_job(fleet: Fleet, kind: str, seconds: float = 90) -> None:
    """Have the job wanted and held within a time, kill the controller; the next one attaches."""
    guest = fleet.guests[0]
    guest.run(FORGET[kind], check=False)
    with Hold.job(guest, kind, JOBS[kind], seconds=seconds) as hold, controller(fleet) as process:
        held = hold.wait(seconds + 20)

        die(process)

        def starts() -> str:
            return guest.run(f"journalctl -u {held['unit']} -o cat | grep -c ^Starting")

        running, begun = guest.unit(held["unit"], "ActiveState", "SubState"), starts()
        assert running == {"ActiveState": "activating", "SubState": "start"}
        proven = guest.run(IS_PROVEN[kind].format(**held["proof"]) + " 2>/dev/null || :")
        if proven and kind == "image-pull":  # docker's daemon goes on while its client is stopped
            raise MissedError("the image was there before the client was stopped")
        assert proven == ""
        attach(fleet, hold)
    assert starts() == begun  # attached to, not begun again
    fleet.site.deploy("--limit", guest.name).must_have_changed_nothing()


def kill_in_a_phase(fleet: Fleet, phase: str, **choices: object) -> None:
    """Kill the controller in a phase of the change to choices; the next one finishes it."""
    guest = fleet.guests[0]
    fleet.site.choices.clear()
    fleet.site.choose(**{**USUAL, **choices})
    with Hold.switch(guest, phase) as hold, controller(fleet) as process:
        held = hold.wait()

        die(process)

        result = guest.json(f"cat /var/lib/spark/switch/{held['release']}.json")
        assert (result["phase"], result["state"]) == (phase, "running")
        assert guest.unit(held["unit"], "ActiveState") == {"ActiveState": "activating"}
    next_runs(fleet)
    assert guest.serving() == guest.boots() == [f"spark-serve@{held['release']}.service"]
    assert guest.answers("What is the capital of France?", "Paris")
