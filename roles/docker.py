"""Install docker and the NVIDIA runtime, and check the GPU in a container."""

from pyinfra.api import deploy

from spark_deploy.config.settings.sources import ProxySettings
from spark_deploy.hosts import docker
from spark_deploy.hosts.docker_facts import DockerState
from spark_deploy.hosts.downloads import DROP_IN_PATH, configure_docker_proxy, configure_job_proxy
from spark_deploy.hosts.facts import expect_fact
from spark_deploy.hosts.files import expect_files
from spark_deploy.hosts.packages import repository_files
from spark_deploy.plan.types import DockerPlan


@deploy("Docker")
def apply(*, plan: DockerPlan, proxy: ProxySettings) -> None:
    """Keep an installed engine and the owner's other settings."""
    expect_files((DROP_IN_PATH, *repository_files(plan.repositories)))
    expect_fact(DockerState, lambda: docker.fact_arguments(plan), slow=True)
    docker.add_docker_repositories(name="Add package repositories", plan=plan)
    docker.install_engine(name="Install engine and NVIDIA toolkit", plan=plan)
    docker.merge_daemon_json(name="Merge daemon.json", plan=plan)
    docker.run_engine(name="Run Docker with our daemon.json settings", plan=plan)
    configure_job_proxy(name="Configure the proxy for docker", proxy=proxy)
    configure_docker_proxy(name="Pull images through the proxy", proxy=proxy)
    docker.add_users(name="Add users to the docker group", plan=plan)
    docker.generate_cdi(name="Generate the CDI specification", plan=plan)
    docker.check_gpu_container(name="Check the GPU in a container", plan=plan)
