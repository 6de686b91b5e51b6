"""Take back what bootstrap granted: the account for deploys or the login user's rule, and our key.

Services go on; whoever deploys again bootstraps again. It ends this controller's way in, so it
comes after `deploys/uninstall.py`, not before.
"""

from pyinfra.api.command import FunctionCommand
from pyinfra.context import host

from roles import unbootstrap
from spark_deploy.inventory.login import endpoint_of, plan_of, prove_shut

unbootstrap.apply(plan=plan_of(host), check=FunctionCommand(prove_shut, [endpoint_of(host)], {}))
