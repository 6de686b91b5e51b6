"""Give deploys access to a new host, with passwords typed once."""

from pyinfra import host
from pyinfra.api import FunctionCommand

from roles import bootstrap
from spark_deploy.inventory.bootstrap import contact_of
from spark_deploy.inventory.login import plan_of, prove

contact = contact_of(host)
bootstrap.apply(
    plan=plan_of(host),
    password=contact.password,
    ready=contact.ready,
    check=FunctionCommand(prove, [contact.endpoint], {}),
)
