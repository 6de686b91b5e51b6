"""Accept exactly the named API keys in ``serve.keys``; in-flight requests continue."""

from pyinfra import host, state

from roles import service
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.inventory.host_names import context_of
from spark_deploy.plan.gateway import named_keys
from spark_deploy.plan.host import base_plan

hold_lease(state, host)
settings = context_of(host).loaded.settings

service.named_keys(plan=base_plan(settings), keys=named_keys(settings.serve))
