"""Every fact parses output of real tools: `<Fact>/<case>.yml`.

A case gives `sections` (what the script prints below each marker: lines, or a capture from
tests/fixtures/captures, or a list of both) and either `value` (dotted attribute paths and their
values) or `error` (pattern of the message).
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyinfra.api.exceptions import FactProcessError

from spark_deploy.hosts.access import LoginAccess
from spark_deploy.hosts.base import BaseState
from spark_deploy.hosts.docker_facts import DockerState
from spark_deploy.hosts.gpu import CudaState
from spark_deploy.hosts.network import Fabric, NetplanFiles, Reachability
from spark_deploy.hosts.survey import HostSurvey

FACTS: dict[str, Any] = {
    fact.__name__: fact
    for fact in (
        *(HostSurvey, BaseState, CudaState, DockerState),
        *(Fabric, LoginAccess, NetplanFiles, Reachability),
    )
}
CAPTURES = Path(__file__).parents[2] / "fixtures" / "captures"
CASES = sorted(Path(__file__).parent.glob("*/*.yml"))


def lines_of(content):
    if isinstance(content, list):
        return [line for item in content for line in lines_of(item)]
    if isinstance(content, dict):
        return (CAPTURES / content["capture"]).read_text().splitlines()
    return str(content).splitlines()


def output_of(sections):
    output = []
    for name, content in sections.items():
        output += [f"== {name}", *lines_of(content)]
    return output


def plain(value):
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def at(value, path):
    for step in path.split("."):
        if step.isdigit():
            value = value[int(step)]
        else:
            value = value[step] if isinstance(value, dict) else getattr(value, step)
    return plain(value)


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_fact_parses_tool_output(case):
    data = yaml.safe_load(case.read_text())
    fact = FACTS[case.parent.name]()
    output = output_of(data["sections"])
    if "error" in data:
        with pytest.raises(FactProcessError, match=data["error"]):
            fact.process(output)
        return
    result = fact.process(output)
    assert {path: at(result, path) for path in data["value"]} == data["value"]


def test_every_fact_has_test_cases():
    assert {case.parent.name for case in CASES} == set(FACTS)
