"""Give cabled ports addresses, or measure the links (``fabric.measure``).

No other deploy changes the network. The host restores the old network after a power cut, or if no
new login succeeds in time.
"""

from pyinfra import host, state
from pyinfra.api import FunctionCommand

from roles import base, fabric, tools
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.hosts.payload import read_payload
from spark_deploy.hosts.uninstall import uninstall_request
from spark_deploy.inventory.host_names import context_of
from spark_deploy.inventory.login import check_login, endpoint_of
from spark_deploy.inventory.plans import payload_identity, ports_of
from spark_deploy.plan.cluster import fabric_links
from spark_deploy.plan.host import base_plan
from spark_deploy.plan.release import unit_and_command_files

hold_lease(state, host)
settings, payload = context_of(host).loaded.settings, read_payload()

if settings.fabric.restore:
    fabric.restore()
else:
    # Plan only these parts, because a cluster's complete plan needs the addresses.
    base.apply(plan=base_plan(settings), request=uninstall_request(settings))
    units = unit_and_command_files(payload.units)
    tools.apply(identity=payload_identity(), files=payload.tools, units=units)
    if settings.fabric.measure:
        ports = ports_of(settings.fabric.hosts or settings.cluster.hosts)
        fabric.measure(links=fabric_links(host.name, settings, ports))
    else:
        endpoint = endpoint_of(host)
        login = None if endpoint.is_local else FunctionCommand(check_login, [endpoint], {})
        fabric.apply(settings=settings, check=login)
