"""Runtime or CDI: the one way to the GPU follows from what the host has.

Docker 20.10 runs in the lab; 28 and 29 are known here by what they printed elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest

from spark_deploy.hosts import docker, docker_facts, gpu
from tests.unit.facts.test_facts import output_of
from tests.unit.operations.test_operations import PLANS, sections_of

FACTORY = "DockerState/factory_without_runtime"  # Docker 29.2.1 of DGX OS
OLD = "DockerState/docker_28_without_cdi"
NEW = "DockerState/docker_29_with_cdi"
RUNTIME = ("--runtime=nvidia",)
DEVICE = ("--runtime=runc", "--device=nvidia.com/gpu=all")


def state(like: str, **changes: Any) -> docker_facts.Docker:
    return docker_facts.DockerState().process(output_of(sections_of({"like": like, **changes})))


@pytest.mark.parametrize(
    ("like", "changes", "wanted"),
    [
        (FACTORY, {}, RUNTIME),
        (FACTORY, {"toolkit-mode": ["auto"]}, RUNTIME),
        (FACTORY, {"toolkit-mode": ["legacy"]}, RUNTIME),
        (FACTORY, {"toolkit-mode": ["cdi"]}, DEVICE),
        (FACTORY, {"runtime": []}, DEVICE),
        (NEW, {}, RUNTIME),
        (NEW, {"toolkit-mode": ["cdi"]}, DEVICE),
        (OLD, {}, RUNTIME),
        # Without CDI in docker the toolkit's runtime resolves the specification itself.
        (OLD, {"toolkit-mode": ["cdi"]}, RUNTIME),
        ("DockerState/nothing_installed", {}, RUNTIME),
    ],
)
def test_the_way_to_the_gpu_follows_from_the_host(
    like: str, changes: dict[str, Any], wanted: tuple[str, ...]
) -> None:
    seen = state(like, **changes)
    assert gpu.gpu_arguments(seen) == wanted
    assert gpu.gpu_problem(seen) is None


def test_no_runtime_and_no_cdi_is_told_with_both_ways_out() -> None:
    problem = gpu.gpu_problem(state(OLD, runtime=[]))
    assert problem is not None
    assert "docker 28.0.0-rc.1 does not read CDI" in str(problem)
    assert "install nvidia-container-runtime, or set docker.daemon" in str(problem)


def test_a_runtime_that_is_not_there_is_not_registered() -> None:
    plan = PLANS["docker"]
    assert "runtimes" not in docker.planned_keys(plan, state(FACTORY, runtime=[]))
    assert "nvidia" in docker.planned_keys(plan, state(FACTORY))["runtimes"]
