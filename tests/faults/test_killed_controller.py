"""A controller that dies anywhere leaves work that the next run finishes."""

from __future__ import annotations

import time

import pytest

from tests.host.conftest import Fleet
from tests.labkit import kill


def run_until(fleet: Fleet, said: str, *, pause_s: float = 0, timeout_s: float = 300) -> None:
    """Run the deploy and kill it with SIGKILL ``pause_s`` after it printed ``said``."""
    process = fleet.site.start("--limit", fleet.guests[0].name)
    lines = []
    deadline = time.monotonic() + timeout_s
    for line in process.stdout or ():
        lines.append(line)
        if said in line:
            time.sleep(pause_s)
            kill(process)
            return
        if time.monotonic() > deadline:
            break
    kill(process)
    raise AssertionError(f"never said {said!r}:\n{''.join(lines[-60:])}")


@pytest.mark.parametrize("job", ["fetch", "build lab", "image"])
def test_killed_while_a_job_runs(fleet: Fleet, job: str) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    guest.run("rm -rf /srv/spark/models/* /srv/spark/sources/*")
    if job == "image":
        guest.run(
            "systemctl stop 'spark-serve@*'; "
            "docker rmi -f $(docker images -q '10.77.0.1:5000/*/stub*')",
            check=False,
        )

    run_until(fleet, job)
    finished = fleet.site.deploy()

    assert finished.exit_code == 0, finished.stderr[-4000:]
    assert fleet.site.deploy().changed == []


# The steps of a change take from milliseconds to seconds; these moments fall into all of them. That
# a change killed on the host itself in each named phase ends proven is for
# test_change_of_release.py.
@pytest.mark.parametrize("after_s", [0, 0.5, 1, 2, 3, 5])
def test_killed_at_any_moment_of_the_switch(fleet: Fleet, after_s: float) -> None:
    fleet.settle()
    fleet.site.choose(profile="v2-tq")

    run_until(fleet, "Serve the release on", pause_s=after_s)
    finished = fleet.site.deploy()

    assert finished.exit_code == 0, finished.stderr[-4000:]
    assert fleet.site.deploy().changed == []
    assert len(fleet.guests[0].serving()) == 1
    assert fleet.guests[0].boots() == fleet.guests[0].serving()
