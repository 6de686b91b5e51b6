"""Runs ended at every point of every operation: the next one finishes, the one after is idle.

The points are those of an undisturbed run, which is watched first (``killing.py``). How the sweep
goes on after it was ended, and which guests it takes: ``sweep.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import disks
from tests.faults.killing import (
    SCENARIOS,
    Place,
    Scenario,
    ended_at,
    points,
    undisturbed,
)
from tests.faults.sweep import GUESTS, Sweep, all_well, side_by_side
from tests.labkit import lab

ABOUT = {
    "first deploy": "a host as it comes",
    "no-op": "a host that serves what is chosen",
    "profile switch": "another profile is chosen, with a tree of its own",
    "rollback": "back to the release that served before",
    "prune": "a release, its tree and its records go",
}
COUNTED = (
    "After each the next run has to go well, the one after it to change nothing, and the host to "
    "hold what it holds after a run that nothing disturbed. A run is ended before, during (half "
    "way in its longest command) and after each operation that sends commands to the host. "
    "Operations that send none leave it as it is: the end of one that did and the beginning of the "
    "next that does are one point."
)
# Ended in other ways too, in the middle of each operation.
OTHERWISE = {"profile switch": ("KILL", "INT", "CUT")}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Place]]:
    expected: dict[str, list[str]] = {}
    yield [Place.on(name, tmp_path_factory.mktemp(name), expected) for name in GUESTS]
    for name in GUESTS:
        disks.forget(name)
        lab("down", name)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=list(SCENARIOS))
def test_a_run_ended_anywhere_is_finished_by_the_next(
    places: list[Place], scenario: Scenario
) -> None:
    sweep = Sweep("kill")
    name = scenario.name
    found = points(
        undisturbed(places[0], scenario, sweep.code), hows=OTHERWISE.get(name, ("KILL",))
    )
    here = {str(point): point for point in found}
    side_by_side(
        places,
        sweep.open_cases(name, here),
        lambda place, case: sweep.tried(name, case, lambda: ended_at(place, scenario, here[case])),
    )
    sweep.write("Runs ended anywhere", ABOUT, places[0].guest, COUNTED)
    all_well(row for row in sweep.rows() if row.group == name)
