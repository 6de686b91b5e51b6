"""CUDA toolkit from a signed repository; what the factory installed is kept."""

from __future__ import annotations

from pyinfra.api.deploy import deploy

from spark_deploy.operations.machine import cuda
from spark_deploy.planning.machine import CudaPlan


@deploy("CUDA")
def apply(*, plan: CudaPlan) -> None:
    """Have the CUDA toolkit without changing the driver."""
    cuda.repositories(name="Add package repositories", plan=plan)
    cuda.toolkit(name="Install the toolkit", plan=plan)
