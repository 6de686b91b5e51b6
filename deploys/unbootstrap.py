"""Revoke the access that bootstrap granted: deploy account or sudo rule, and our key.

Services keep running. Run `deploys/uninstall.py` first, because this controller cannot log in
afterwards.
"""

from pyinfra import host
from pyinfra.api import FunctionCommand

from roles import setup
from spark_deploy.inventory.login import bootstrap_plan, check_no_access, endpoint_of

setup.revoke_access(
    plan=bootstrap_plan(host), check=FunctionCommand(check_no_access, [endpoint_of(host)], {})
)
