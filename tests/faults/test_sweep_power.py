"""The power is cut in each step of the host's work, with what was not synced yet.

``lab break power-cut`` shuts the guest's filesystem down as a power cut does: not even its journal
is flushed, and files and directory entries that nobody synced are gone at the next boot.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import disks
from tests.faults.killing import SCENARIOS, STEPS, Place, host_steps, step_ended, undisturbed
from tests.faults.sweep import GUESTS, Sweep, all_well, side_by_side
from tests.labkit import lab

GROUP = "work of the host"
ABOUT = {GROUP: "jobs of a first deploy, and phases of a rollout"}
COUNTED = (
    "The work is stopped at the step, the controller is killed, and the filesystem (ext4 on a loop "
    "device) is shut down without a flush of its journal: what was not synced is lost. The host "
    "boots, then the deploy is run again."
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Place]]:
    expected: dict[str, list[str]] = {}
    yield [Place.on(name, tmp_path_factory.mktemp(name), expected) for name in GUESTS]
    for name in GUESTS:
        disks.forget(name)
        lab("down", name)


def test_a_power_cut_in_any_step_loses_nothing_that_was_proven(places: list[Place]) -> None:
    sweep = Sweep("power-lab")
    for scenario, steps in STEPS.items():
        cases = host_steps(steps, "power cut")
        if left := sweep.open_cases(GROUP, cases):
            undisturbed(places[0], SCENARIOS[scenario], sweep.code)
        side_by_side(
            places,
            left,
            lambda place, case, cases=cases: sweep.tried(
                GROUP, case, lambda: step_ended(place, *cases[case])
            ),
        )
        sweep.write(
            "Power cut in the steps of a host's work",
            ABOUT,
            places[0].guest,
            COUNTED,
            "tests/faults/test_sweep_power.py",
            [one for all_ in STEPS.values() for one in host_steps(all_, "power cut")],
        )
    all_well(row for row in sweep.rows() if row.group == GROUP)
