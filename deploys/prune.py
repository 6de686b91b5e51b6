"""Remove what no kept release needs: `--dry` shows each thing and its bytes.

What serves, what group_vars say, ``keep_ready`` and ``releases.keep`` earlier releases stay, and
everything that this project did not make.
"""

from pyinfra.context import host, state

from roles import service
from spark_deploy.hosts.lease import hold_lease
from spark_deploy.inventory.plans import plan_for
from spark_deploy.plan.jobs import keep_of

hold_lease(state, host)
plan = plan_for(host)

service.prune(keep=keep_of(plan))
