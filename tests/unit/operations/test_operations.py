"""Every operation yields exactly what a host's state requires: `<module>.<operation>/<case>.yml`.

A case gives `plan` (fields that differ from the plan below), `fact` (sections as in the fact
cases, or `like: <Fact>/<case>` and sections that differ), further `arguments`, and either `noop`
(pattern of the reason) or `commands` (one regular expression for each; a function shows as
`name(arguments)`) and `log` (patterns of logged lines).
"""

import dataclasses
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from spark_deploy.config.settings.host import (
    BaseSettings,
    ClusterSettings,
    ExpectSettings,
    PathSettings,
)
from spark_deploy.config.settings.sources import RepositorySettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts import access, base, docker, fabric, facts, gpu, preflight
from spark_deploy.plan import types
from tests.unit.operations.fake_host import FakeHost, on, run_operation, sections_of

CASES = sorted(Path(__file__).parent.glob("*/*.yml"))
MODULES = {
    "access": access, "base": base, "gpu": gpu, "docker": docker, "fabric": fabric,
    "preflight": preflight,
}  # fmt: skip
VENDOR = RepositorySettings(
    name="vendor",
    url="https://packages.example.test/cuda",
    suite="./",
    components=(),
    key_url="https://packages.example.test/key.asc",
    key_sha256="ab" * 32,
)
NEEDS = types.PreflightPlan(
    expect=ExpectSettings(),
    takeover=(),
    allow_memory_holders=(),
    ports=(8000,),
    disk_needed_bytes=(("/srv/spark/models/x", 80 << 30), ("/var/lib/docker", 20 << 30)),
    disk_reserve_bytes=20 << 30,
    memory_needed_bytes=90 << 30,
    memory_total_min_bytes=110 << 30,
    images=("spark-vllm:0123456789ab",),
)
PLANS: dict[str, Any] = {
    "fabric": Settings(cluster=ClusterSettings(hosts=("spark-1", "spark-2"))),
    "base": types.BasePlan(
        settings=BaseSettings(), packages=("curl", "nginx-light"), paths=PathSettings()
    ),
    "gpu": types.CudaPlan("13.0", "cuda-toolkit-13-0", (VENDOR,), package_lock_wait_s=1800),
    "docker": types.DockerPlan(
        packages=("docker.io",),
        toolkit_packages=("nvidia-container-toolkit",),
        repositories=(VENDOR,),
        daemon={},
        check_image="registry.example.test/check@sha256:00",
        package_lock_wait_s=1800,
    ),
    "preflight": NEEDS,
    "access": types.BootstrapPlan(public_key="ssh-ed25519 AAAAkey ann@desk"),
}


def frozen(value):
    if isinstance(value, dict) and "other_mtu" in value:
        return types.FabricLink(**value)
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_operation_runs_exactly_the_commands_that_the_host_state_requires(case):
    data = yaml.safe_load(case.read_text())
    module, _, name = case.parent.name.partition(".")
    changes = {key: frozen(value) for key, value in data.get("plan", {}).items()}
    if "settings" in changes:
        changes["settings"] = BaseSettings(**changes["settings"])
    plan = dataclasses.replace(PLANS[module], **changes)
    host = FakeHost(sections_of(data["fact"]))
    named = data.get("arguments", {})
    positional = [] if named.pop("without_plan", False) else [plan]
    commands = run_operation(host, getattr(MODULES[module], name), *positional, **named)
    if "noop" in data:
        assert commands == []
        assert re.search(data["noop"], host.noops[0])
        return
    assert len(commands) == len(data["commands"]), commands
    for command, pattern in zip(commands, data["commands"], strict=True):
        assert re.search(pattern, command, re.DOTALL), command
    for pattern in data.get("log", []):
        assert any(re.search(pattern, line) for line in host.logs), host.logs


def test_every_operation_has_a_case_with_commands_and_one_without():
    kinds: dict[str, set[str]] = defaultdict(set)
    for case in CASES:
        kinds[case.parent.name].add(
            "noop" if "noop" in yaml.safe_load(case.read_text()) else "acts"
        )
    operations = {
        f"{name}.{attribute}"
        for name, module in MODULES.items()
        for attribute, value in vars(module).items()
        if hasattr(value, "_inner") and value.__module__ == module.__name__
    }
    operations.remove("fabric.measure_links")
    assert kinds == {name: {"noop", "acts"} for name in operations}


@pytest.mark.parametrize(("max_age_s", "reads"), [(facts.MAX_AGE_S, 1), (-1.0, 2)])
def test_execution_reuses_only_recent_facts_from_the_dry_run(monkeypatch, max_age_s, reads):
    monkeypatch.setattr(facts, "MAX_AGE_S", max_age_s)
    host = FakeHost(sections_of({"like": "DockerState/factory_without_runtime"}))
    with on(host, executing=False):
        list(docker.install_engine._inner(PLANS["docker"]))
    with on(host) as state:
        for operation in (docker.install_engine, docker.merge_daemon_json, docker.run_engine):
            list(operation._inner(PLANS["docker"]))
        assert host.fact_reads == reads
        state.ops[host]["hash"] = SimpleNamespace(operation_meta=SimpleNamespace(executed=True))
        list(docker.merge_daemon_json._inner(PLANS["docker"]))
    assert host.fact_reads == reads + 1


def test_rejects_a_host_whose_state_cannot_be_read():
    host = FakeHost({})
    host.get_fact = lambda *_, **__: None
    [command] = run_operation(host, docker.install_engine, PLANS["docker"])
    assert command.startswith("_report_failure(")
    assert "could not read the state" in command
