"""Set up a host for services, or undo this: access, packages, docker, CUDA, tools, network.

Driver, kernel, firmware and swap are never changed; only ``fabric`` changes the network.
"""

from collections.abc import Sequence

from pyinfra.api import FunctionCommand, HiddenValue, deploy

from spark_deploy.config.settings.sources import ProxySettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts import access, base, docker, fabric, gpu, preflight
from spark_deploy.hosts.docker_facts import DockerState
from spark_deploy.hosts.downloads import DROP_IN_PATH, configure_docker_proxy, configure_job_proxy
from spark_deploy.hosts.facts import expect_fact
from spark_deploy.hosts.files import expect_files
from spark_deploy.hosts.packages import repository_files
from spark_deploy.hosts.payload import (
    PythonSite,
    install_site,
    install_tools,
    read_payload,
    tool_files,
)
from spark_deploy.hosts.uninstall import record_initial_state, uninstall, uninstall_request
from spark_deploy.plan.release import unit_and_command_files
from spark_deploy.plan.types import (
    BasePlan,
    BootstrapPlan,
    CudaPlan,
    DockerPlan,
    FabricLink,
    PayloadIdentity,
    PreflightPlan,
)


@deploy("Bootstrap")
def grant_access(
    *, plan: BootstrapPlan, password: HiddenValue | None, ready: bool, check: FunctionCommand
) -> None:
    if plan.account:
        access.create_account(name="Create the deploy account", plan=plan, password=password)
    else:
        if plan.public_key:
            access.install_key(name="Install our key", plan=plan)
        access.allow_sudo(name="Allow sudo without a password", plan=plan, password=password)
    access.verify_access(name="Verify key and sudo", ready=ready, check=check)


@deploy("Unbootstrap")
def revoke_access(*, plan: BootstrapPlan, check: FunctionCommand) -> None:
    access.revoke_access(name="Remove account, rule and key", plan=plan, check=check)


@deploy("Preflight")
def check_host(*, plan: PreflightPlan) -> None:
    preflight.check_host(name="Check that the host fits", plan=plan)
    preflight.check_cluster(name="Check that its cluster fits", plan=plan)
    preflight.take_over(name="Take over containers", plan=plan)


@deploy("Base")
def install_base(*, plan: BasePlan, settings: Settings) -> None:
    expect_fact(base.BaseState, lambda: base.fact_arguments(plan))
    expect_files(base.MANAGED_PATHS)
    request = uninstall_request(settings)
    record_initial_state(
        name="Record the state before the first deploy", plan=plan, request=request
    )
    # Hold the driver before installing packages, because a damaged file in apt.conf.d prevents
    # all installations.
    base.hold_driver(name="Hold driver packages in unattended upgrades", plan=plan)
    base.install_packages(name="Install packages", plan=plan)
    base.create_directories(name="Create directories", plan=plan)
    base.disable_sleep(name="Disable sleep", plan=plan)
    base.protect_login(name="Guarantee memory to the login", plan=plan)
    base.set_compaction(name="Set the kernel's compaction", plan=plan)
    base.set_boot_target(name="Boot without the desktop", plan=plan)
    base.run_earlyoom(name="Run earlyoom", plan=plan)


@deploy("Tools")
def install_host_tools(*, identity: PayloadIdentity) -> None:
    """Install the host tools and the pinned wheels of the checkpoint builder."""
    payload = read_payload()
    files, units = payload.tools, unit_and_command_files(payload.units)
    expect_files(file.path for file in (*tool_files(identity, files), *units))
    expect_fact(PythonSite)
    # Install the packages first, so that no job starts with new tools but without packages.
    install_site(name="Install the builder's Python packages", identity=identity)
    install_tools(name="Install host tools", identity=identity, files=files, units=units)


@deploy("CUDA")
def install_cuda(*, plan: CudaPlan) -> None:
    expect_fact(gpu.CudaState, lambda: gpu.fact_arguments(plan))
    expect_files(repository_files(plan.repositories))
    gpu.add_cuda_repositories(name="Add package repositories", plan=plan)
    gpu.install_cuda(name="Install the toolkit", plan=plan)


@deploy("Docker")
def install_docker(*, plan: DockerPlan, proxy: ProxySettings) -> None:
    """Install docker and the NVIDIA runtime; keep an installed engine and the owner's settings."""
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


@deploy("Fabric")
def set_up_fabric(*, settings: Settings, check: FunctionCommand | None) -> None:
    fabric.set_up_ports(name="Set up the ports between hosts", settings=settings, check=check)


@deploy("Fabric")
def measure_fabric(*, links: Sequence[FabricLink]) -> None:
    """Measure hosts in sequence, because they share the cables."""
    fabric.measure_links(name="Measure the links to the next host", links=links, _serial=True)


@deploy("Fabric")
def restore_network() -> None:
    fabric.restore_network(name="Restore the earlier network")


@deploy("Uninstall")
def remove_all(*, settings: Settings) -> None:
    uninstall(name="Remove managed resources", request=uninstall_request(settings))
