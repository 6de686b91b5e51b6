"""Install packages, create directories and protect the host.

Driver, kernel, firmware, network and swap are never changed.
"""

from pyinfra.api import deploy

from spark_deploy.hosts import base
from spark_deploy.hosts.facts import expect_fact
from spark_deploy.hosts.files import expect_files
from spark_deploy.hosts.uninstall import record_initial_state
from spark_deploy.plan.types import BasePlan


@deploy("Base")
def apply(*, plan: BasePlan, request: str) -> None:
    """``request`` is the result of ``uninstall_request``."""
    expect_fact(base.BaseState, lambda: base.fact_arguments(plan))
    expect_files(base.MANAGED_PATHS)
    record_initial_state(
        name="Record the state before the first deploy", plan=plan, request=request
    )
    # This precedes packages, because a damaged file in apt.conf.d prevents all installations.
    base.hold_driver(name="Hold driver packages in unattended upgrades", plan=plan)
    base.install_packages(name="Install packages", plan=plan)
    base.create_directories(name="Create directories", plan=plan)
    base.disable_sleep(name="Disable sleep", plan=plan)
    base.protect_login(name="Guarantee memory to the login", plan=plan)
    base.set_compaction(name="Set the kernel's compaction", plan=plan)
    base.set_boot_target(name="Boot without the desktop", plan=plan)
    base.run_earlyoom(name="Run earlyoom", plan=plan)
