"""Make an INT4 checkpoint of the 16-bit repository, with AutoRound in the engine's image.

It stops no engine: without enough memory the job fails. A killed job continues with the current
block. `checkpoint.source: requantized` serves the result.
"""

from pyinfra import host, state

from roles import base, cuda, docker, tools, work
from spark_deploy.config.errors import PlanError
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.hosts.payload import read_payload
from spark_deploy.hosts.uninstall import uninstall_request
from spark_deploy.inventory.host_names import context_of
from spark_deploy.inventory.plans import plan_for
from spark_deploy.plan.jobs import jobs_of
from spark_deploy.plan.release import unit_files_of

hold_lease(state, host)
plan, payload = plan_for(host), read_payload()
if plan.requantized is None:
    fix = "run `spark-deploy add MODEL --requantize`, or set checkpoint.source: requantized"
    raise PlanError.one(host.name, "the settings request no requantised checkpoint", fix)
jobs = tuple(w for w in jobs_of(plan, payload.image_context) if w.job.kind != "checkpoint")
release = f"{plan.serve.service}-requantize"

base.apply(plan=plan.base, request=uninstall_request(context_of(host).loaded.settings))
tools.apply(identity=plan.payload, files=payload.tools, units=unit_files_of(payload.units))
work.fetch(jobs=jobs, release=release, proxy=plan.proxy, fleet=plan.fleet)
cuda.apply(plan=plan.cuda)
docker.apply(plan=plan.docker, proxy=plan.proxy)
work.image(jobs=tuple(w for w in jobs if w.job.kind != "requantize"), release=release)
work.quantise(jobs=jobs, image=plan.image.tag, release=release)
work.close()
