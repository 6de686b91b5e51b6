"""Packages, directories and host care; never driver, kernel, firmware, network or swap."""

from __future__ import annotations

from pyinfra.api.deploy import deploy

from spark_deploy.hosts.facts.packages import BaseState
from spark_deploy.hosts.operations import base
from spark_deploy.hosts.operations.prefetch import expect
from spark_deploy.hosts.operations.uninstall import noted
from spark_deploy.plan.machine import BasePlan


@deploy("Base")
def apply(*, plan: BasePlan, asked: str) -> None:
    """Have the packages and directories everything after this needs, on a host that stays awake.

    Args:
        plan: which.
        asked: what is noted of the host before it is changed.
    """
    expect(BaseState, lambda: base.question(plan))
    noted(name="Note what the host was before", plan=plan, asked=asked)
    # First: a damaged file in apt.conf.d stops every installation after it.
    base.driver_hold(name="Hold driver packages in unattended upgrades", plan=plan)
    base.packages(name="Install packages", plan=plan)
    base.owned_directories(name="Create directories", plan=plan)
    base.no_sleep(name="Disable sleep", plan=plan)
    base.login_memory(name="Guarantee memory to the login", plan=plan)
    base.compaction(name="Set the kernel's compaction", plan=plan)
    base.boot_target(name="Boot without the desktop", plan=plan)
    base.early_killer(name="Run earlyoom", plan=plan)
