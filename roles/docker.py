"""Container engine and NVIDIA runtime, proven by a container that sees the GPU."""

from __future__ import annotations

from pyinfra.api.deploy import deploy

from spark_deploy.config.settings.sources import ProxySettings
from spark_deploy.hosts.facts.docker import DockerState
from spark_deploy.hosts.operations import docker
from spark_deploy.hosts.operations.files import look_at
from spark_deploy.hosts.operations.prefetch import expect
from spark_deploy.hosts.operations.proxy import DROP_IN, proxied_docker, proxied_jobs
from spark_deploy.plan.machine import DockerPlan


@deploy("Docker")
def apply(*, plan: DockerPlan, proxy: ProxySettings) -> None:
    """Have containers that see the GPU; the factory's engine and its settings are kept."""
    look_at((DROP_IN,))
    expect(DockerState, lambda: docker.question(plan), long=True)
    docker.repositories(name="Add package repositories", plan=plan)
    docker.engine(name="Install engine and NVIDIA toolkit", plan=plan)
    docker.daemon_config(name="Merge daemon.json", plan=plan)
    docker.running(name="Run the engine with our keys", plan=plan)
    proxied_jobs(name="Have the proxy where docker finds it", proxy=proxy)
    proxied_docker(name="Pull images through the proxy", proxy=proxy)
    docker.users(name="Let users use docker", plan=plan)
    docker.cdi_specification(name="Keep CDI with the driver", plan=plan)
    docker.gpu_container(name="Prove the GPU in a container", plan=plan)
