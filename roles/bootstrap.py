"""Install the SSH key and the sudo rule that deploys need; this machine needs the rule alone."""

from __future__ import annotations

from pyinfra.api.command import FunctionCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.hiddenvalue import HiddenValue

from spark_deploy.hosts import access
from spark_deploy.plan.machine import BootstrapPlan


@deploy("Bootstrap")
def apply(
    *, plan: BootstrapPlan, password: HiddenValue | None, ready: bool, check: FunctionCommand
) -> None:
    """Install key and sudo rule, then prove them with a new login."""
    if plan.account:
        access.create_account(name="Have an account for deploys", plan=plan, password=password)
    else:
        if plan.public_key:
            access.install_key(name="Install our key", plan=plan)
        access.allow_sudo(name="Let sudo work without a password", plan=plan, password=password)
    access.verify_access(name="Prove key and sudo", ready=ready, check=check)
