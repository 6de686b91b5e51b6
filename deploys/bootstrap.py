"""A new host: password login and sudo password, asked once for all, never needed again."""

from pyinfra.api.command import FunctionCommand
from pyinfra.context import host

from roles import bootstrap
from spark_deploy.inventory.bootstrap import contact_of, needs_none, prove
from spark_deploy.planning.types import BootstrapPlan

if needs_none(host.name):
    host.log("nothing to bootstrap: no login over ssh leads here")
else:
    contact = contact_of(host)
    bootstrap.apply(
        plan=BootstrapPlan(public_key=contact.public_key),
        password=contact.password,
        ready=contact.access.ready,
        check=FunctionCommand(prove, [contact.endpoint], {}),
    )
