import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from spark_contract.gateway import Replicas

from spark_deploy.config.errors import SparkError
from spark_deploy.config.settings.load import HostSettings
from spark_deploy.inventory.clusters import cluster_problems
from spark_deploy.inventory.host_names import CONTEXT_KEY
from spark_deploy.plan.gateway import base_urls, gateway_plan
from tests.unit.planning.test_cluster import FABRIC, PAIR, clustered, plan_on

HEAD = clustered()
OTHER_VALUES = {
    ("serve", "names"): ("one", "two"),
    ("engine", "options"): {"seed": 1},
    ("engine", "environment"): {"A_B": "c"},
    ("allow_containers",): {"comfyui": 12},
    ("images",): {**HEAD.images, "engine": "vllm/vllm-openai:v0.32.0"},
}


def leaves(part, path=()):
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, (*path, field.name))
        else:
            yield (*path, field.name), value


def other_values(path, value):
    if path in OTHER_VALUES:
        return (OTHER_VALUES[path],)
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, (int, float)):
        return (value + 1, value * 2)
    return (f"{value}x",) if isinstance(value, str) else (1, 2048, 0.5, "on")


def with_value(part, path, value):
    name, *rest = path
    value = with_value(getattr(part, name), tuple(rest), value) if rest else value
    return dataclasses.replace(part, **{name: value})


def release_digest(settings):
    try:
        return plan_on(PAIR[0], FABRIC, settings).release.digest
    except (SparkError, TypeError, ValueError, AttributeError, KeyError):
        return None


def problems_with(member):
    hosts = {
        name: HostSettings(name, "spark", Path(), settings, {})
        for name, settings in zip(PAIR, (HEAD, member), strict=True)
    }
    return [problem.where for problem in cluster_problems(hosts)]


def test_rejects_cluster_members_with_different_releases():
    digest, changing = release_digest(HEAD), set()
    for path, value in leaves(HEAD):
        for other in other_values(path, value):
            try:
                member = with_value(HEAD, path, other)
            except ValidationError:
                continue
            if release_digest(member) not in (digest, None):
                changing.add(".".join(path))
                assert problems_with(member), f"{'.'.join(path)} changes the release"
    assert {"engine.options", "serve.drain_s", "watch.stall_s", "paths.models_dir"} <= changing
    assert len(changing) > 15


CLUSTER = {"cluster": {"hosts": ["a", "b"]}}
REPLICAS = {
    "replicas": {"hosts": ["a", "b"]}, "serve": {"expose": "lan", "api_key": {"env": "KEY"}}
}  # fmt: skip


def lan(**serve):
    return {**REPLICAS, "serve": {**REPLICAS["serve"], **serve}}


@pytest.mark.parametrize(
    ("group", "host", "message"),
    [
        ({"cluster": {"hosts": ["a", "d"]}}, {}, "a: cluster.hosts: 'd' is not in"),
        ({"cluster": {"hosts": ["a"]}}, {}, "cluster.hosts: a is the only host"),
        (CLUSTER, {"profile": "base"}, "b: profile: differs from the value of a"),
        (CLUSTER, {"lock_file": "other.yml"}, "b: lock_file: differs from the value of a"),
        (CLUSTER, {"cluster": {"hosts": []}}, "b: cluster.hosts: is empty, but a's list"),
        ({"rollout": {"canary": "z"}}, {}, "'z' is not a host in this inventory"),
        ({**REPLICAS, "replicas": {"hosts": ["a", "d"]}}, {}, "a: replicas.hosts: 'd' is not in"),
        ({**REPLICAS, "replicas": {"hosts": ["a"]}}, {}, "replicas.hosts: a is the only host"),
        (lan(expose="loopback"), {}, "serve.expose"),
        (lan(tls="private-ca"), {}, "serve.tls"),
        ({**REPLICAS, "serve": {"expose": "lan"}}, {}, "serve.api_key"),
        ({**REPLICAS, "rollout": {"at_once": 2}}, {}, "rollout.at_once"),
        ({**REPLICAS, **CLUSTER}, {}, "replicas.hosts"),
        ({**REPLICAS, "replicas": {"hosts": ["a", "b"], "port": 8000}}, {}, "replicas.port"),
        (REPLICAS, {"replicas": {"hosts": []}}, "b: replicas.hosts: is empty, but a's list"),
        (REPLICAS, {"serve": {"names": ["other"]}}, "b: serve.names: differs from the value of a"),
    ],
)
def test_rejects_contradictory_settings_of_clusters_and_replicas(repository, group, host, message):
    repository.list_hosts('["a", "b", "c"]')
    repository.write("group_vars/spark.yml", yaml.safe_dump(group))
    repository.write("host_vars/b.yml", yaml.safe_dump(host))
    assert message in repository.error()


def test_hosts_outside_the_cluster_serve_alone(repository):
    repository.list_hosts('["a", "b", "c"]')
    repository.write("group_vars/spark.yml", "cluster: {hosts: [a, b]}\nrollout: {canary: b}\n")
    hosts = {
        name: data[CONTEXT_KEY].loaded.settings.cluster.hosts
        for name, data in repository.read().items()
    }
    assert hosts == {"a": ("a", "b"), "b": ("a", "b"), "c": ()}


@pytest.mark.parametrize(
    ("ssh", "refused"),
    [
        ({}, True),
        ({"user": "other"}, True),
        ({"port": 2222}, False),
        ({"hostname": "192.168.1.22"}, False),
    ],
)
def test_rejects_two_names_for_one_machine(repository, ssh, refused):
    first = {"hostname": "192.168.1.21"}
    for name, settings in (("spark-1", first), ("spark-2", {**first, **ssh})):
        repository.write(f"host_vars/{name}.yml", yaml.safe_dump({"ssh": settings}))
    with pytest.raises(SparkError, match="same address") if refused else nullcontext():
        repository.read()


def test_replicas_connect_through_fleet_addresses(repository):
    repository.list_hosts('["a", "b", "c"]')
    repository.write("group_vars/spark.yml", yaml.safe_dump(REPLICAS))
    repository.write("host_vars/b.yml", "fleet: {address: 10.0.0.2}\n")
    hosts = {name: data[CONTEXT_KEY].loaded.settings for name, data in repository.read().items()}
    plans = {name: gateway_plan(settings, name) for name, settings in hosts.items()}
    assert {name: plan.settings.replicas for name, plan in plans.items()} == {
        "a": Replicas(8008, ("10.0.0.2:8000",)),
        "b": Replicas(8008, ("a:8000",)),
        "c": None,
    }
    assert base_urls(plans["a"])[-1] == ("http://a:8008/v1", "the network, all replicas")
