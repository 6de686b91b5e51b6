"""Give deploys access to new hosts; you type a password only once."""

from pyinfra import host
from pyinfra.api import FunctionCommand

from roles import setup
from spark_deploy.inventory.bootstrap import contact_of
from spark_deploy.inventory.login import bootstrap_plan, check_access

contact = contact_of(host)
setup.grant_access(
    plan=bootstrap_plan(host),
    password=contact.password,
    ready=contact.ready,
    check=FunctionCommand(check_access, [contact.endpoint], {}),
)
