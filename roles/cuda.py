"""CUDA toolkit from a signed repository; what the factory installed is kept."""

from __future__ import annotations

from pyinfra.api.deploy import deploy

from spark_deploy.hosts.facts.gpu import CudaState
from spark_deploy.hosts.operations import cuda
from spark_deploy.hosts.operations.prefetch import expect
from spark_deploy.plan.machine import CudaPlan


@deploy("CUDA")
def apply(*, plan: CudaPlan) -> None:
    """Have the CUDA toolkit without changing the driver."""
    expect(CudaState, lambda: cuda.question(plan))
    cuda.repositories(name="Add package repositories", plan=plan)
    cuda.toolkit(name="Install the toolkit", plan=plan)
