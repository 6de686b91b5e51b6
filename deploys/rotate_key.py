"""Replace API keys that were generated on hosts; in-flight requests continue.

To replace a key of the controller, change the value that ``serve.api_key`` reads, and run
``deploy.py``.
"""

from pyinfra import host, state

from roles import service
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.inventory.host_names import context_of
from spark_deploy.plan.gateway import gateway_plan

hold_lease(state, host)
settings = context_of(host).loaded.settings

service.rotate_key(plan=gateway_plan(settings, host.name))
