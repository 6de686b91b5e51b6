"""Prepare hosts without a model or service, to check the hosts before a long download."""

from pyinfra import host, state

from roles import setup
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.inventory.host_names import context_of
from spark_deploy.inventory.plans import plan_for

hold_lease(state, host)
plan = plan_for(host)

setup.check_host(plan=plan.preflight)
setup.install_base(plan=plan.base, settings=context_of(host).loaded.settings)
setup.install_cuda(plan=plan.cuda)
setup.install_docker(plan=plan.docker, proxy=plan.proxy)
