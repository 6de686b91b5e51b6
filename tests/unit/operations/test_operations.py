"""Every operation yields exactly what a host's state asks for: `<module>.<operation>/<case>.yml`.

A case gives `plan` (fields that differ from the plan below), `fact` (sections as in the fact
cases, or `like: <Fact>/<case>` and sections that differ), further `arguments`, and either `noop`
(words of the reason) or `commands` (one regular expression for each; a function shows as
`name(arguments)`).
"""

from __future__ import annotations

import base64
import dataclasses
import io
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pyinfra.api.command import FunctionCommand
from pyinfra.api.state import StateStage
from pyinfra.context import ctx_host, ctx_state

from spark_deploy.config.settings.cluster import ClusterSettings
from spark_deploy.config.settings.host import BaseSettings, ExpectSettings, PathSettings
from spark_deploy.config.settings.sources import RepositorySettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.hosts import access, base, docker, fabric, facts, gpu, preflight
from spark_deploy.plan.types import (
    BasePlan,
    BootstrapPlan,
    CudaPlan,
    DockerPlan,
    FileState,
    ManagedFile,
    NeedsPlan,
    Way,
)

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("*/*.yml"))
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
NEEDS = NeedsPlan(
    expect=ExpectSettings(),
    takeover=(),
    allow_memory_holders=(),
    ports=(8000,),
    disk_needed_bytes=(("/srv/spark/models/x", 80 << 30), ("/var/lib/docker", 20 << 30)),
    disk_reserve_bytes=20 << 30,
    memory_needed_bytes=90 << 30,
    memory_total_min_bytes=110 << 30,
    docker_dir="/var/lib/docker",
    images=("spark-vllm:0123456789ab",),
)
PLANS: dict[str, Any] = {
    "fabric": Settings(cluster=ClusterSettings(hosts=("spark-1", "spark-2"))),
    "base": BasePlan(
        settings=BaseSettings(), packages=("curl", "nginx-light"), paths=PathSettings()
    ),
    "gpu": CudaPlan(
        version="13.0",
        package="cuda-toolkit-13-0",
        repositories=(VENDOR,),
        package_lock_wait_s=1800,
    ),
    "docker": DockerPlan(
        packages=("docker.io",),
        toolkit_packages=("nvidia-container-toolkit",),
        repositories=(VENDOR,),
        daemon={},
        check_image="registry.example.test/check@sha256:00",
        package_lock_wait_s=1800,
    ),
    "preflight": NEEDS,
    "access": BootstrapPlan(public_key="ssh-ed25519 AAAAkey ann@desk"),
}


def frozen(value: Any) -> Any:
    if isinstance(value, dict) and "other_mtu" in value:
        return Way(**value)
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value


class FakeHost:
    """Answers facts by name, from its files, or from sections; records messages.

    A callable fact gets the arguments.
    """

    name = "spark-1"
    current_op_global_arguments: Any = None

    def __init__(
        self,
        sections: dict[str, Any] | None = None,
        *,
        files: Iterable[ManagedFile] | None = None,
        **facts: Any,
    ):
        from tests.unit.facts.test_facts import output_of

        self.output = output_of(sections or {})
        self.facts = facts
        self.files = None if files is None else {file.path: file for file in files}
        self.asked = 0
        self.noops: list[str] = []
        self.logs: list[str] = []
        self.state: Any = SimpleNamespace(inventory=[], results={}, is_executing=True)

    def get_fact(self, fact: Any, **arguments: Any) -> Any:
        arguments.pop("_sudo", None)
        assert isinstance(fact().command(**arguments), str)
        self.asked += 1
        if fact.__name__ in self.facts:
            answer = self.facts[fact.__name__]
            return answer(**arguments) if callable(answer) else answer
        if fact is facts.FileStates and self.files is not None:
            present = [file for path in arguments["paths"] if (file := self.files.get(path))]
            return {file.path: state_of(file) for file in present}
        return fact().process(self.output)

    def noop(self, text: str) -> None:
        self.noops.append(text)

    def log(self, text: str, **_: Any) -> None:
        self.logs.append(text)

    log_styled = log


def state_of(file: ManagedFile) -> FileState:
    return FileState(file.mode, "root:root", file.sha256)


@contextmanager
def on(host: Any, executing: bool = True):
    host.state.is_executing = executing
    state = SimpleNamespace(
        is_executing=executing,
        current_stage=StateStage.Execute if executing else StateStage.Prepare,
        inventory=SimpleNamespace(get_host=lambda name: host),
        ops=defaultdict(dict),
        failed_hosts=set(),
    )
    with ctx_state.use(state), ctx_host.use(host):
        yield state


def sections_of(fact: dict[str, Any]) -> dict[str, Any]:
    like = fact.get("like")
    base_case = HERE.parent / "facts" / f"{like}.yml"
    sections = yaml.safe_load(base_case.read_text())["sections"] if like else {}
    own = {key: value for key, value in fact.items() if key != "like"}
    return {**{k: v for k, v in sections.items() if k != "end"}, **own, "end": []}


def shown(command: Any) -> str:
    if isinstance(command, str):
        return command
    if isinstance(command, FunctionCommand):
        return f"{command.function.__name__}({', '.join(map(str, command.args))})"
    return str(command)


def outcome(host: FakeHost, operation: Any, *arguments: Any, executing: bool = True) -> list[str]:
    with on(host, executing):
        return [shown(command) for command in operation._inner(*arguments)]


def sent_files(command: Any) -> list[bytes]:
    """Unpack the files on a command's standard input."""
    archive = base64.b64decode(command.connector_arguments.get("_stdin", ""))
    if not archive:
        return []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return [file.read() for member in tar if (file := tar.extractfile(member))]


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_operation_does_what_the_state_asks_for(case: Path) -> None:
    data = yaml.safe_load(case.read_text())
    module, _, name = case.parent.name.partition(".")
    changes = {key: frozen(value) for key, value in data.get("plan", {}).items()}
    if "settings" in changes:
        changes["settings"] = BaseSettings(**changes["settings"])
    plan = dataclasses.replace(PLANS[module], **changes)
    host = FakeHost(sections_of(data["fact"]))
    with on(host):
        arguments = data.get("arguments", {})
        given = [] if arguments.pop("without_plan", False) else [plan]
        operation = getattr(MODULES[module], name)
        commands = [shown(command) for command in operation._inner(*given, **arguments)]
    if "noop" in data:
        assert commands == []
        assert re.search(data["noop"], host.noops[0])
        return
    assert len(commands) == len(data["commands"]), commands
    for command, wanted in zip(commands, data["commands"], strict=True):
        assert re.search(wanted, command, re.DOTALL), command
    for line in data.get("says", []):
        assert any(re.search(line, said) for said in host.logs), host.logs


def test_every_operation_has_a_case_that_does_nothing_and_one_that_acts() -> None:
    seen: dict[str, set[str]] = defaultdict(set)
    for case in CASES:
        seen[case.parent.name].add("noop" if "noop" in yaml.safe_load(case.read_text()) else "acts")
    operations = {
        f"{name}.{attribute}"
        for name, module in MODULES.items()
        for attribute, value in vars(module).items()
        if hasattr(value, "_inner") and value.__module__ == module.__name__
    }
    operations.remove("fabric.measure_links")  # changes nothing: test_fabric_measured.py
    assert {name: seen[name] for name in operations} == {
        name: {"noop", "acts"} for name in operations
    }


def test_operations_of_a_role_share_one_look_at_the_host() -> None:
    host = FakeHost(sections_of({"like": "DockerState/factory_without_runtime"}))
    with on(host):
        for operation in (docker.install_engine, docker.merge_daemon_json, docker.run_engine):
            list(operation._inner(PLANS["docker"]))
    assert host.asked == 1


def test_a_look_at_the_host_is_forgotten_once_a_command_ran() -> None:
    host = FakeHost(sections_of({"like": "DockerState/factory_without_runtime"}))
    with on(host) as state:
        list(docker.install_engine._inner(PLANS["docker"]))
        state.ops[host]["hash"] = SimpleNamespace(operation_meta=SimpleNamespace(executed=True))
        list(docker.merge_daemon_json._inner(PLANS["docker"]))
    assert host.asked == 2


def asked_in_both_stages() -> int:
    host = FakeHost(sections_of({"like": "DockerState/factory_without_runtime"}))
    for executing in (False, True, True):
        with on(host, executing=executing):
            list(docker.install_engine._inner(PLANS["docker"]))
    return host.asked


def test_a_prediction_of_seconds_ago_is_taken_for_the_state_at_execution() -> None:
    assert asked_in_both_stages() == 1


def test_an_older_prediction_is_not_taken_for_the_state_at_execution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(facts, "MAX_AGE_S", -1.0)
    assert asked_in_both_stages() == 2


def test_a_host_that_cannot_be_read_is_refused_and_not_taken_for_empty() -> None:
    host = FakeHost({})
    host.get_fact = lambda *_, **__: None  # what pyinfra gives after a failed fact
    with on(host):
        commands = [shown(command) for command in docker.install_engine._inner(PLANS["docker"])]
    assert len(commands) == 1
    assert commands[0].startswith("_refuse(")
    assert "could not read the state" in commands[0]
