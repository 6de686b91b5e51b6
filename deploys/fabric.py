"""Give the cabled ports between hosts their addresses: tried, confirmed by a new login, kept.

With ``fabric.measure`` it changes no network, and says what the ways between the hosts carry.

The only part of this project that changes a host's network, and only when asked to. Unless it is
confirmed in time the old network returns by itself; a power cut ends a try as well.
"""

from pyinfra.api.command import FunctionCommand
from pyinfra.context import host, state

from roles import base, fabric, tools
from spark_deploy.hosts.lease import hold_lease
from spark_deploy.hosts.payload import read_payload
from spark_deploy.hosts.uninstall import uninstall_request
from spark_deploy.inventory.host_names import known_of
from spark_deploy.inventory.login import endpoint_of, prove_way
from spark_deploy.inventory.plans import payload_identity, ports_of
from spark_deploy.plan.fabric import rails
from spark_deploy.plan.host import base_plan, tools_plan
from spark_deploy.plan.release import unit_files_of

hold_lease(state, host)
settings, payload = known_of(host).found.settings, read_payload()

if settings.fabric.restore:
    fabric.restore()
else:
    # Not the plan of what is served: that of a cluster needs the very addresses.
    base.apply(plan=base_plan(settings), request=uninstall_request(settings))
    tools.apply(
        plan=tools_plan(payload_identity()),
        files=payload.tools,
        units=unit_files_of(payload.units),
    )
    if settings.fabric.measure:
        found = ports_of(settings.fabric.hosts or settings.cluster.hosts)
        fabric.measure(ways=rails(host.name, settings, found))
    else:
        endpoint = endpoint_of(host)
        login = None if endpoint.is_local else FunctionCommand(prove_way, [endpoint], {})
        fabric.apply(settings=settings, check=login)
