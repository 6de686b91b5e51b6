"""Container engine and NVIDIA runtime, proven by a container that sees the GPU."""

from __future__ import annotations

from pyinfra.api.deploy import deploy

from spark_deploy.operations.machine import docker
from spark_deploy.planning.types import DockerPlan


@deploy("Docker")
def apply(*, plan: DockerPlan) -> None:
    """Have containers that see the GPU; the factory's engine and its settings are kept."""
    docker.repositories(name="Add package repositories", plan=plan)
    docker.engine(name="Install engine and NVIDIA toolkit", plan=plan)
    docker.daemon_config(name="Merge daemon.json", plan=plan)
    docker.running(name="Run the engine with our keys", plan=plan)
    docker.users(name="Let users use docker", plan=plan)
    docker.cdi_specification(name="Keep CDI with the driver", plan=plan)
    docker.gpu_container(name="Prove the GPU in a container", plan=plan)
