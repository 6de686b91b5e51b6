"""CUDA toolkit from a signed repository; what the factory installed is kept."""

from __future__ import annotations

from pyinfra.api.deploy import deploy

from spark_deploy.hosts import gpu
from spark_deploy.hosts.facts import expect_fact
from spark_deploy.hosts.gpu import CudaState
from spark_deploy.plan.machine import CudaPlan


@deploy("CUDA")
def apply(*, plan: CudaPlan) -> None:
    """Have the CUDA toolkit without changing the driver."""
    expect_fact(CudaState, lambda: gpu.fact_arguments(plan))
    gpu.add_cuda_repositories(name="Add package repositories", plan=plan)
    gpu.install_cuda(name="Install the toolkit", plan=plan)
