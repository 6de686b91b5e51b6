"""Give cabled ports addresses, or measure the links (``fabric.measure``).

No other deploy changes the network. The host restores the previous network after a power cut, or if
no new login succeeds in time.
"""

from pyinfra import host, state
from pyinfra.api import FunctionCommand

from roles import setup
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.inventory.host_names import context_of
from spark_deploy.inventory.login import check_login, endpoint_of
from spark_deploy.inventory.plans import payload_identity, ports_of
from spark_deploy.plan.cluster import fabric_links
from spark_deploy.plan.host import base_plan

hold_lease(state, host)
settings = context_of(host).loaded.settings

if settings.fabric.restore:
    setup.restore_network()
else:
    # Plan only these parts, because a cluster's complete plan needs the addresses.
    setup.install_base(plan=base_plan(settings), settings=settings)
    setup.install_host_tools(identity=payload_identity())
    if settings.fabric.measure:
        ports = ports_of(settings.fabric.hosts or settings.cluster.hosts)
        setup.measure_fabric(links=fabric_links(host.name, settings, ports))
    else:
        endpoint = endpoint_of(host)
        login = None if endpoint.is_local else FunctionCommand(check_login, [endpoint], {})
        setup.set_up_fabric(settings=settings, check=login)
