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
    STEPS,
    Place,
    Point,
    Scenario,
    Sent,
    ended_at,
    ended_one_after_another,
    host_steps,
    points,
    step_ended,
    undisturbed,
)
from tests.faults.sweep import GUESTS, Row, Sweep, all_well, side_by_side
from tests.labkit import lab

WORK = "work of the host"
CHAINED = ("first deploy", "profile switch")
ABOUT = {
    "first deploy, run after run": "a host as it comes; each run is ended at the next point",
    "first deploy": "the same, in the middle of operations that take a while, each on a host anew",
    "profile switch, run after run": "another profile is chosen, with a tree of its own",
    "profile switch": "the same, in the middle of each operation, each on a host anew",
    "no-op": "a host that serves what is chosen",
    "rollback": "back to the release that served before",
    "prune": "a release, its tree and its records go",
    WORK: "jobs and phases of a rollout, stopped there and then ended",
}
COUNTED = (
    "A run is ended before, during (half way in its longest command) and after each operation that "
    "sends commands to the host. Operations that send none leave it as it is: the end of one that "
    "did and the beginning of the next that does are one point. Then the next run has to go well, "
    "the one after it to change nothing, and the host to hold what it holds after a run that "
    "nothing disturbed. Where runs are ended one after another that is looked at once, at the end "
    "of the chain; a point there whose operation had nothing left to send, because the host had "
    "gone on by itself, is left out."
)
ENDED = ("its process killed", "the controller killed")
LISTED = [case for steps in STEPS.values() for case in host_steps(steps, *ENDED)]
LONG_S = 1.5
CHAINS = {"killed": "KILL", "interrupted": "INT", "cut off": "CUT"}


def on_hosts_anew(name: str, operations: list[Sent]) -> list[Point]:
    """Return the points that are tried each by itself; where runs are chained not all are."""
    every = points(operations, hows=("KILL", "INT", "CUT"))
    if name not in CHAINED:
        return every
    long = {one.number for one in operations if max(one.seconds, default=0) > LONG_S}
    middles = [one for one in every if one.is_middle]
    if name == "first deploy":
        return [one for one in middles if one.number in long and one.how == "KILL"]
    return [one for one in middles if one.number in long or one.how == "KILL"]


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
    operations = undisturbed(places[0], scenario, sweep.code)
    here = {str(point): point for point in on_hosts_anew(name, operations)}
    side_by_side(
        places,
        sweep.open_cases(name, here),
        lambda place, case: sweep.tried(name, case, lambda: ended_at(place, scenario, here[case])),
    )
    sweep.write("Runs ended anywhere", ABOUT, places[0].guest, COUNTED, listed=LISTED)
    all_well(row for row in sweep.rows() if row.group == name)


@pytest.mark.parametrize("name", CHAINED)
def test_runs_ended_one_after_another_at_every_point_are_finished_by_the_last(
    places: list[Place], name: str
) -> None:
    sweep, scenario, group = Sweep("kill"), SCENARIOS[name], f"{name}, run after run"
    operations = undisturbed(places[0], scenario, sweep.code)
    chains = {
        which: [point for point in points(operations, hows=(how,)) if point.how == how]
        for which, how in CHAINS.items()
    }

    def one(place: Place, which: str) -> Row:
        chain = chains[which]
        return sweep.tried_as_one(
            group, list(map(str, chain)), lambda: ended_one_after_another(place, scenario, chain)
        )

    left = [which for which, one in chains.items() if sweep.open_cases(group, [str(one[-1])])]
    side_by_side(places, left, one)
    sweep.write("Runs ended anywhere", ABOUT, places[0].guest, COUNTED, listed=LISTED)
    all_well(row for row in sweep.rows() if row.group == group)


def test_work_of_the_host_ended_in_any_phase_is_finished_by_the_next(places: list[Place]) -> None:
    sweep, group = Sweep("kill"), WORK
    for scenario, steps in STEPS.items():
        cases = host_steps(steps, *ENDED)
        if left := sweep.open_cases(group, cases):
            undisturbed(places[0], SCENARIOS[scenario], sweep.code)
        side_by_side(
            places,
            left,
            lambda place, case, cases=cases: sweep.tried(
                group, case, lambda: step_ended(place, *cases[case])
            ),
        )
        sweep.write("Runs ended anywhere", ABOUT, places[0].guest, COUNTED, listed=LISTED)
    all_well(row for row in sweep.rows() if row.group == group)
