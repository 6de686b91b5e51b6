"""Make an INT4 checkpoint from a 16-bit repository, with AutoRound in the engine's image.

Engines keep running; if there is too little memory, the job fails. The next run resumes a killed
job at its current block. Set `checkpoint.source: requantized` to serve the result.
"""

from pyinfra import host, state
from spark_contract.job import CHECKPOINT_JOB, RANK_JOB, REQUANTIZE_JOB

from roles import setup, work
from spark_deploy.config.errors import PlanError
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.hosts.payload import read_payload
from spark_deploy.inventory.host_names import context_of
from spark_deploy.inventory.plans import plan_for
from spark_deploy.plan.jobs import plan_jobs

hold_lease(state, host)
plan, payload = plan_for(host), read_payload()
if plan.requantized is None:
    fix = "run `spark-deploy add MODEL --requantize`, or set checkpoint.source: requantized"
    raise PlanError.single(host.name, "checkpoint.source is not requantized", fix)
later = (CHECKPOINT_JOB, RANK_JOB)
jobs = tuple(job for job in plan_jobs(plan, payload.image_context) if job.job.kind not in later)
release = f"{plan.release.service}-requantize"

setup.install_base(plan=plan.base, settings=context_of(host).loaded.settings)
setup.install_host_tools(identity=plan.payload)
work.fetch(
    jobs=jobs,
    release=release,
    proxy=plan.proxy,
    fleet=plan.fleet,
    used_ports=plan.preflight.ports,
)
setup.install_cuda(plan=plan.cuda)
setup.install_docker(plan=plan.docker, proxy=plan.proxy)
image_jobs = tuple(job for job in jobs if job.job.kind != REQUANTIZE_JOB)
work.prepare_image(jobs=image_jobs, release=release)
work.quantize(jobs=jobs, image=plan.image.tag, release=release)
work.stop_peer_downloads()
