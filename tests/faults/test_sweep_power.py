"""A power cut in any step of a host's work loses no proven release.

``lab break power-cut`` shuts the guest's filesystem down without flushing its journal: unsynced
files and directory entries are lost.
"""

from __future__ import annotations

from tests.faults.interruptions import (
    SCENARIOS,
    STEPS,
    Place,
    interrupt_host_step,
    list_host_steps,
    run_undisturbed,
)
from tests.faults.sweep import Sweep, assert_all_passed, run_in_parallel
from tests.faults.test_sweep_kill import HOST_WORK, places

__all__ = ["places"]

ABOUT = {HOST_WORK: "jobs of a first deploy, and phases of a rollout"}
COUNTED = (
    "The step is paused, the controller is killed, and the filesystem (ext4 on a loop device) is "
    "shut down without flushing its journal: unsynced data is lost. The host boots, and the deploy "
    "runs again."
)


def test_power_cut_in_any_step_is_repaired(places: list[Place]) -> None:
    sweep = Sweep("power-lab")
    for scenario, steps in STEPS.items():
        cases = list_host_steps(steps, "power cut")
        if left := sweep.open_cases(HOST_WORK, cases):
            run_undisturbed(places[0], SCENARIOS[scenario], sweep.code)
        run_in_parallel(
            places,
            left,
            lambda place, case, cases=cases: sweep.run_case(
                HOST_WORK, case, lambda: interrupt_host_step(place, *cases[case])
            ),
        )
    sweep.write(
        "Power cut in the steps of a host's work",
        ABOUT,
        places[0].guest,
        COUNTED,
        "tests/faults/test_sweep_power.py",
        [case for steps in STEPS.values() for case in list_host_steps(steps, "power cut")],
    )
    assert_all_passed(row for row in sweep.rows() if row.group == HOST_WORK)
