"""daemon.json is merged: nothing of others is lost, nothing is written twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_deploy.hosts import docker

CAPTURES = Path(__file__).parents[2] / "fixtures" / "captures"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(max_size=5), json_values, max_size=4)


def test_a_file_with_nvidia_as_default_is_kept_as_it_is() -> None:
    present = docker.parse_daemon_json(
        (CAPTURES / "docker-daemon-json--nvidia-default--01.txt").read_text()
    )
    assert docker.merge_with_runtime(present, {}) == present


def test_an_empty_file_gets_the_runtime() -> None:
    assert docker.merge_with_runtime(docker.parse_daemon_json(" \n"), {}) == {
        "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "args": []}}
    }


def test_lists_unite_and_objects_merge() -> None:
    present = {"insecure-registries": ["a:1"], "log-opts": {"max-size": "1m"}, "bip": "10.0.0.1/24"}
    wanted = {"insecure-registries": ["b:1", "a:1"], "log-opts": {"max-file": "3"}}
    assert docker.merge(present, wanted) == {
        "insecure-registries": ["a:1", "b:1"],
        "log-opts": {"max-size": "1m", "max-file": "3"},
        "bip": "10.0.0.1/24",
    }


@given(json_objects, json_objects)
def test_merging_twice_is_merging_once_and_loses_no_key(present, wanted) -> None:
    once = docker.merge_with_runtime(present, wanted)
    assert docker.merge_with_runtime(once, wanted) == once
    assert set(once) >= set(present) | set(wanted)
    assert docker.parse_daemon_json(json.dumps(once)) == once


@pytest.mark.parametrize("text", ["[]", "{", '"x"', "{'a': 1}", '{"a": 1,}'])
def test_what_is_no_object_is_an_error_and_not_an_empty_file(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any JSON complaint will do
        docker.parse_daemon_json(text)


@pytest.mark.parametrize(
    ("key", "value", "info", "met"),
    [
        ("runtimes", {"nvidia": {}}, {"Runtimes": {"runc": {}}}, False),
        ("runtimes", {"nvidia": {}}, {"Runtimes": {"nvidia": {}}}, True),
        ("live-restore", True, {"LiveRestoreEnabled": False}, False),
        (
            "insecure-registries",
            ["10.0.0.0/8"],
            {"RegistryConfig": {"InsecureRegistryCIDRs": ["10.0.0.0/8"]}},
            True,
        ),
        (
            "insecure-registries",
            ["r:5000"],
            {"RegistryConfig": {"IndexConfigs": {"r:5000": {"Secure": True}}}},
            False,
        ),
        (
            "insecure-registries",
            ["r:5000"],
            {"RegistryConfig": {"IndexConfigs": {"r:5000": {"Secure": False}}}},
            True,
        ),
        ("registry-mirrors", ["https://m"], {"RegistryConfig": {"Mirrors": ["https://m/"]}}, True),
        ("registry-mirrors", ["https://m"], {"RegistryConfig": {"Mirrors": None}}, False),
        ("data-root", "/data", {"DockerRootDir": "/var/lib/docker"}, False),
        ("bip", "10.0.0.1/24", {}, True),
    ],
)
def test_what_the_daemon_runs_with_is_read_from_docker_info(key, value, info, met) -> None:
    assert (docker.unmet_keys({key: value}, info) == ()) is met
