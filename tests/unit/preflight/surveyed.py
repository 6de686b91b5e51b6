"""What a host says of itself, and what preflight makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from spark_deploy.hosts.preflight import judge
from spark_deploy.hosts.survey import HostSurvey, Survey
from tests.unit.facts.test_facts import output_of
from tests.unit.operations.test_operations import NEEDS

HEALTHY = {
    "meminfo": ["MemTotal: 125513944 kB", "MemAvailable: 120000000 kB"],
    "processes": [],
    "compute-apps": [],
    "containers": [],
    "listeners": [],
    "places": [
        "/srv/spark/models/x\t0\t/dev/nvme0n1p2\t3670016000\t/",
        "/var/lib/docker\t0\t/dev/nvme0n1p2\t3670016000\t/",
    ],
}
OLLAMA = (
    '{"id":"a1","name":"/ollama","image":"ollama/ollama","state":"STATE","restart":"RESTART",'
    '"runtime":"runc","requests":null,"labels":null}'
)


def survey(**sections: Any) -> Survey:
    case = Path(__file__).parents[1] / "facts" / "HostSurvey" / "factory_spark.yml"
    seen = yaml.safe_load(case.read_text())["sections"]
    return HostSurvey().process(
        output_of({**seen, **HEALTHY, **{k.replace("_", "-"): v for k, v in sections.items()}})
    )


def problems(seen: Survey, **needs: Any) -> list[str]:
    return [str(p) for p in judge(dataclasses.replace(NEEDS, **needs), seen).problems]


def warnings(seen: Survey, **needs: Any) -> list[str]:
    return [str(p) for p in judge(dataclasses.replace(NEEDS, **needs), seen).warnings]


def one(found: list[str], *words: str) -> None:
    assert len(found) == 1, found
    for word in words:
        assert word in found[0]
