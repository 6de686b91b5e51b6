"""Remove checkpoints and images that releases no longer need; `--dry` lists items and sizes."""

from pyinfra import host, state

from roles import service
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.inventory.plans import plan_for
from spark_deploy.plan.jobs import keep_list

hold_lease(state, host)
plan = plan_for(host)

service.prune(keep=keep_list(plan))
