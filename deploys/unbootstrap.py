"""Revoke the access of bootstrap: the deploy account or the login user's rule, and our key.

Services continue; a later deploy bootstraps again. Run `deploys/uninstall.py` before: after this,
the controller cannot log in.
"""

from pyinfra import host
from pyinfra.api import FunctionCommand

from roles import bootstrap
from spark_deploy.inventory.login import bootstrap_plan, check_no_access, endpoint_of

bootstrap.revoke(
    plan=bootstrap_plan(host), check=FunctionCommand(check_no_access, [endpoint_of(host)], {})
)
