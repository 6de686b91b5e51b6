"""The next run finishes a run that was interrupted at any point of any operation.

``interruptions.py`` lists the points from an undisturbed run.
"""

from functools import partial

import pytest

from tests.faults import disks
from tests.faults.interruptions import (
    SCENARIOS,
    STEPS,
    Host,
    interrupt_and_repair,
    interrupt_host_step,
    interrupt_in_a_row,
    list_host_steps,
    list_points,
    run_undisturbed,
)
from tests.faults.sweep import GUESTS, Sweep, run_in_parallel
from tests.labkit import lab

HOST_WORK = "work of the host"
CHAINED = ("first deploy", "profile switch")
ABOUT = {
    "first deploy, run after run": "a bare host; each run is interrupted at the next point",
    "first deploy": "interrupted in the middle of long operations, each time on a new host",
    "profile switch, run after run": "to a profile with another checkpoint",
    "profile switch": "interrupted in the middle of each operation, each time on a new host",
    "models on request": "adds two services; starting the second stops the first",
    "no-op": "a host that already serves the chosen release",
    "rollback": "back to the previous release",
    "prune": "removes a release with its checkpoint and state files",
    HOST_WORK: "jobs and rollout phases, paused and then killed",
}
COUNTED = (
    "A run is interrupted before, during (halfway in the longest command) and after each operation "
    "that sends commands to the host; the end of an operation and the start of the next count as a "
    "single point. The next run must succeed, a second run must change nothing, and the host must "
    "equal a host after an undisturbed run. A chain of interrupted runs is checked only at the "
    "end, and points whose operation had nothing to send are left out."
)
KILLED = ("its process killed", "the controller killed")
LISTED = [case for steps in STEPS.values() for case in list_host_steps(steps, *KILLED)]
LONG_S = 1.5
CHAINS = {"killed": "KILL", "interrupted": "INT", "cut off": "CUT"}


def points_on_new_hosts(name, operations):
    hows = ("KILL",) if name == "models on request" else ("KILL", "INT", "CUT")
    points = list_points(operations, hows=hows)
    if name not in CHAINED:
        return points
    long = {op.number for op in operations if max(op.seconds, default=0) > LONG_S}
    middles = [point for point in points if point.moment == "during"]
    if name == "first deploy":
        return [point for point in middles if point.number in long and point.how == "KILL"]
    return [point for point in middles if point.number in long or point.how == "KILL"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    expected: dict[str, list[str]] = {}
    yield [Host.start(name, tmp_path_factory.mktemp(name), expected) for name in GUESTS]
    for name in GUESTS:
        disks.delete_copies(name)
        lab("down", name)


def finish(sweep, group, host):
    sweep.write("Interrupted runs", ABOUT, host.guest, COUNTED, listed=LISTED)
    sweep.assert_passed(group)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=list(SCENARIOS))
def test_next_deploy_finishes_interrupted_deploy(hosts, scenario):
    sweep, group = Sweep("kill"), scenario.name
    operations = run_undisturbed(hosts[0], scenario, sweep.code)
    points = {str(point): point for point in points_on_new_hosts(group, operations)}
    sweep.run_group(
        group, points, hosts, lambda host, case: interrupt_and_repair(host, scenario, points[case])
    )
    finish(sweep, group, hosts[0])


@pytest.mark.parametrize("name", CHAINED)
def test_last_deploy_finishes_after_a_series_of_interrupted_deploys(hosts, name):
    sweep, scenario, group = Sweep("kill"), SCENARIOS[name], f"{name}, run after run"
    operations = run_undisturbed(hosts[0], scenario, sweep.code)
    chains = {
        title: [point for point in list_points(operations, hows=(how,)) if point.how == how]
        for title, how in CHAINS.items()
    }

    def run_chain(host, title):
        chain = chains[title]
        return sweep.run_chain(
            group, list(map(str, chain)), lambda: interrupt_in_a_row(host, scenario, chain)
        )

    todo = [title for title, chain in chains.items() if sweep.open_cases(group, [str(chain[-1])])]
    run_in_parallel(hosts, todo, run_chain)
    finish(sweep, group, hosts[0])


def interrupt_host_steps(sweep, hosts, *victims):
    for scenario, steps in STEPS.items():
        cases = list_host_steps(steps, *victims)
        if sweep.open_cases(HOST_WORK, cases):
            run_undisturbed(hosts[0], SCENARIOS[scenario], sweep.code)
        sweep.run_group(HOST_WORK, cases, hosts, partial(interrupt_host_case, cases))


def interrupt_host_case(cases, host, case):
    return interrupt_host_step(host, *cases[case])


def test_next_deploy_finishes_host_work_killed_in_any_phase(hosts):
    sweep = Sweep("kill")
    interrupt_host_steps(sweep, hosts, *KILLED)
    finish(sweep, HOST_WORK, hosts[0])
