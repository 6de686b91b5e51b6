"""The CUDA toolkit: kept when it is there, else installed. The driver is never touched."""

from __future__ import annotations

from typing import Any

from pyinfra.api.operation import operation
from pyinfra.context import host

from spark_deploy.hosts.facts.fact_cache import read
from spark_deploy.hosts.facts.gpu import Cuda, CudaState, Toolkit
from spark_deploy.hosts.operations import apt
from spark_deploy.hosts.operations.host_errors import Commands, host_errors
from spark_deploy.plan.machine import CudaPlan


def question(plan: CudaPlan) -> dict[str, Any]:
    """Build the arguments of the one fact of this role."""
    return {
        "urls": tuple(repository.url for repository in plan.repositories),
        "repository_files": apt.repository_files(plan.repositories),
    }


def state_of(plan: CudaPlan) -> Cuda:
    """Read what the host has; one command for all operations of the role."""
    return read(CudaState, **question(plan))


def usable(toolkits: tuple[Toolkit, ...], version: str) -> Toolkit | None:
    """Pick a toolkit of the planned major version that is not older than planned."""
    wanted = _numbers(version)
    fitting = [t for t in toolkits if _numbers(t.version)[0] == wanted[0]]
    newest = max(fitting, key=lambda toolkit: _numbers(toolkit.version), default=None)
    return newest if newest and _numbers(newest.version) >= wanted else None


def _numbers(version: str) -> tuple[int, int]:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return int(major), int(minor or 0)


@operation()
@host_errors
def repositories(plan: CudaPlan) -> Commands:
    """Have the repositories of ``plan`` where the toolkit has to be installed from them."""
    state = state_of(plan)
    needed = usable(state.toolkits, plan.version) is None
    yield from apt.add_repositories(plan.repositories, state.repositories, needed=needed)


@operation()
@host_errors
def toolkit(plan: CudaPlan) -> Commands:
    """Have a CUDA toolkit of the planned version; one that is there is kept as it is."""
    found = usable(state_of(plan).toolkits, plan.version)
    if found:
        host.noop(f"CUDA {found.version} at {found.path} is kept")
        return
    yield apt.install([plan.package], plan.package_lock_wait_s)
