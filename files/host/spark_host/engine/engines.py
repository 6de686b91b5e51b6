"""The engines of a host, as a rollout sees them."""

from __future__ import annotations

from spark_contract.errors import HostToolError
from spark_contract.host.paths import Paths
from spark_contract.serving.release import Release

from spark_host.engine import memory, serve, tree
from spark_host.engine.client import Engine
from spark_host.engine.serve import part_problem as part_problem
from spark_host.system import docker
from spark_host.system.log import Report, log


def problem(release: Release, paths: Paths) -> HostToolError | None:
    """Return why no engine of this release could be started; ``None`` when one could.

    What was touched of its tree is hashed here, while the engine before it still serves.
    """
    found = (
        serve.part_problem(release)
        or docker.gpu_problem(paths)
        or memory.problem(release.memory.needed_bytes)
    )
    if found is not None:
        return found
    try:
        tree.prove(release, log)
    except HostToolError as error:
        return error
    return None


def make_room(release: Release, report: Report) -> None:
    """Remove every container of this service and return once this release's memory is free."""
    for container in docker.engine_containers(release.service):
        docker.remove_container(container)
    memory.wait_for_memory(release, report)


def unfinished(release: Release, paths: Paths) -> float:
    """Return how many requests the engine of a release has not answered yet.

    Raises:
        SilentError: It did not say so in time.
        EngineError: It is not there, or answers an error.
    """
    return Engine.of(release, paths).metrics(5).unfinished
