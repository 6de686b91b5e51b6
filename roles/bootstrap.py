"""Grant or revoke access for deploys: SSH key and sudo rule."""

from pyinfra.api import FunctionCommand, HiddenValue, deploy

from spark_deploy.hosts import access
from spark_deploy.plan.types import BootstrapPlan


@deploy("Bootstrap")
def apply(
    *, plan: BootstrapPlan, password: HiddenValue | None, ready: bool, check: FunctionCommand
) -> None:
    if plan.account:
        access.create_account(name="Create the deploy account", plan=plan, password=password)
    else:
        if plan.public_key:
            access.install_key(name="Install our key", plan=plan)
        access.allow_sudo(name="Allow sudo without a password", plan=plan, password=password)
    access.verify_access(name="Verify key and sudo", ready=ready, check=check)


@deploy("Unbootstrap")
def revoke(*, plan: BootstrapPlan, check: FunctionCommand) -> None:
    access.revoke_access(name="Remove account, rule and key", plan=plan, check=check)
