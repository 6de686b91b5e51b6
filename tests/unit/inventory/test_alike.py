"""Members of a cluster serve one release: whatever changes it has to be the same on all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from spark_deploy.config.errors import SparkError
from spark_deploy.config.settings.load import HostSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.inventory.clusters import cluster_problems
from tests.unit.planning.test_cluster import FABRIC, PAIR, clustered, plan_on

HERE = clustered()
SET_BY_HAND = {
    ("serve", "names"): ("one", "two"),
    ("engine", "options"): {"seed": 1},
    ("engine", "environment"): {"A_B": "c"},
    ("allow_containers",): {"comfyui": 12},
    ("images",): {**HERE.images, "engine": "vllm/vllm-openai:v0.32.0"},
}


def leaves(part: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, (*path, field.name))
        else:
            yield (*path, field.name), value


def others(path: tuple[str, ...], value: Any) -> tuple[Any, ...]:
    """Return values that a setting may have instead."""
    if path in SET_BY_HAND:
        return (SET_BY_HAND[path],)
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, (int, float)):
        return (value + 1, value * 2)
    return (f"{value}x",) if isinstance(value, str) else (1, 2048, 0.5, "on")


def put(part: Any, path: tuple[str, ...], value: Any) -> Any:
    name, *rest = path
    value = put(getattr(part, name), tuple(rest), value) if rest else value
    return dataclasses.replace(part, **{name: value})


def digest(settings: Settings) -> str | None:
    try:
        return plan_on(PAIR[0], FABRIC, settings).serve.digest
    except (SparkError, TypeError, ValueError, AttributeError, KeyError):  # not a value it may have
        return None


def refused(member: Settings) -> list[str]:
    hosts = {
        name: HostSettings(name, "spark", Path(), one, {})
        for name, one in zip(PAIR, (HERE, member), strict=True)
    }
    return [problem.where for problem in cluster_problems(hosts)]


def test_a_member_that_would_have_another_release_is_refused() -> None:
    ours, changing = digest(HERE), set()
    for path, value in leaves(HERE):
        for other in others(path, value):
            try:
                member = put(HERE, path, other)
            except ValidationError:  # not a value it may have
                continue
            if digest(member) not in (ours, None):
                changing.add(".".join(path))
                assert refused(member), f"{'.'.join(path)} changes the release"
    assert {"engine.options", "serve.drain_s", "watch.interval_s", "paths.models_dir"} <= changing
    assert len(changing) > 20


@pytest.mark.parametrize("key", ["lock_file", "profile"])
def test_a_member_that_goes_by_another_lock_or_profile_is_refused(key: str) -> None:
    assert refused(dataclasses.replace(HERE, **{key: "another"})) == [f"{PAIR[1]}: {key}"]
