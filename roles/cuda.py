"""Install the CUDA toolkit, unless one is installed; the driver is never changed."""

from pyinfra.api import deploy

from spark_deploy.hosts import gpu
from spark_deploy.hosts.facts import expect_fact
from spark_deploy.hosts.files import expect_files
from spark_deploy.hosts.packages import repository_files
from spark_deploy.plan.types import CudaPlan


@deploy("CUDA")
def apply(*, plan: CudaPlan) -> None:
    expect_fact(gpu.CudaState, lambda: gpu.fact_arguments(plan))
    expect_files(repository_files(plan.repositories))
    gpu.add_cuda_repositories(name="Add package repositories", plan=plan)
    gpu.install_cuda(name="Install the toolkit", plan=plan)
