"""Deploy a proven model server from an SSH login: ``pyinfra inventory/spark.py deploy.py``.

Each step skips what is already correct, so a second run changes nothing, and the next run completes
a killed run.
"""

from pyinfra import host, state

from roles import service, setup, work
from spark_deploy.hosts.commands import host_loop
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.hosts.payload import read_payload
from spark_deploy.inventory.host_names import context_of
from spark_deploy.inventory.plans import plan_for, waves_for
from spark_deploy.plan.jobs import discard_jobs, ready_jobs, served_jobs
from spark_deploy.plan.release import release_files

hold_lease(state, host)
plan, payload = plan_for(host), read_payload()
jobs, release = served_jobs(plan, payload.image_context), plan.release.name

service.reboot(plan=plan.preflight, release=plan.release)
setup.check_host(plan=plan.preflight)
setup.install_base(plan=plan.base, settings=context_of(host).loaded.settings)
setup.install_host_tools(identity=plan.payload)
# These jobs need no container engine and run in parallel with the next steps.
work.fetch(
    jobs=jobs,
    release=release,
    proxy=plan.proxy,
    fleet=plan.fleet,
    used_ports=plan.preflight.ports,
)
work.build_checkpoint(jobs=jobs, release=release)
setup.install_cuda(plan=plan.cuda)
setup.install_docker(plan=plan.docker, proxy=plan.proxy)
work.prepare_image(jobs=jobs, release=release)
service.prepare(jobs=jobs, release=release)
# Stopping unlisted services frees memory for the others.
service.retire(
    services=tuple(entry.release.service for entry in plan.served),
    accepted_overrides=plan.preflight.expect.unit_overrides,
)
for entry in host_loop(plan.served):
    service.serve(
        release=entry.release,
        gateway=entry.gateway,
        files=release_files(entry),
        waves=waves_for(state),
        schedule=entry.schedule,
    )
for entry in host_loop(plan.served):
    service.verify(release=entry.release, gateway=entry.gateway, schedule=entry.schedule)
# These jobs come last, because they must not delay services.
other_jobs = ready_jobs(plan, payload.image_context)
work.prepare_other_models(jobs=other_jobs, service=plan.release.service)
work.stop_peer_downloads()
service.schedule(schedule=plan.schedule)
# By now no other model needs the base, and the checkpoint is proven.
work.remove_base(jobs=discard_jobs(plan), release=release)
