"""Prepare hosts without a model or service, to check them before a long download."""

from pyinfra import host, state

from roles import base, cuda, docker, preflight
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.hosts.uninstall import uninstall_request
from spark_deploy.inventory.host_names import context_of
from spark_deploy.inventory.plans import plan_for

hold_lease(state, host)
plan = plan_for(host)

preflight.apply(plan=plan.preflight)
base.apply(plan=plan.base, request=uninstall_request(context_of(host).loaded.settings))
cuda.apply(plan=plan.cuda)
docker.apply(plan=plan.docker, proxy=plan.proxy)
