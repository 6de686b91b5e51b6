"""A power cut in any step of a host's work loses no proven release.

``lab break power-cut`` shuts the guest's filesystem down without flushing its journal: unsynced
files and directory entries are lost.
"""

from tests.faults.interruptions import STEPS, list_host_steps
from tests.faults.sweep import Sweep
from tests.faults.test_sweep_kill import HOST_WORK, hosts, interrupt_host_steps

__all__ = ["hosts"]

ABOUT = {HOST_WORK: "jobs of a first deploy, and phases of a rollout"}
COUNTED = (
    "The step is paused, the controller is killed, and the filesystem (ext4 on a loop device) is "
    "shut down without flushing its journal: unsynced data is lost. The host boots, and the deploy "
    "runs again."
)


def test_next_deploy_repairs_host_after_power_cut_in_any_step(hosts):
    sweep = Sweep("power-lab")
    interrupt_host_steps(sweep, hosts, "power cut")
    sweep.write(
        "Power cut in the steps of a host's work",
        ABOUT,
        hosts[0].guest,
        COUNTED,
        "tests/faults/test_sweep_power.py",
        [case for steps in STEPS.values() for case in list_host_steps(steps, "power cut")],
    )
    sweep.assert_passed(HOST_WORK)
