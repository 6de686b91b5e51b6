"""Surveys of hosts that differ from a factory Spark, and the expected verdict of preflight."""

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from spark_deploy.hosts.preflight import check_survey
from spark_deploy.hosts.survey import HostSurvey, Survey
from tests.unit.facts.test_facts import output_of
from tests.unit.operations.test_operations import NEEDS

HEALTHY = {
    "meminfo": ["MemTotal: 125513944 kB", "MemAvailable: 120000000 kB"],
    "processes": [],
    "compute-apps": [],
    "containers": [],
    "listeners": [],
    "paths": [
        "/srv/spark/models/x\t0\t/dev/nvme0n1p2\t3670016000\t/",
        "/var/lib/docker\t0\t/dev/nvme0n1p2\t3670016000\t/",
    ],
}
_OLLAMA = (
    '{"id":"a1","name":"/ollama","image":"ollama/ollama","state":"STATE","restart":"RESTART",'
    '"runtime":"runc","requests":null,"labels":null}'
)


def ollama(state: str = "running", restart: str = "always", name: str = "ollama") -> str:
    text = _OLLAMA.replace("STATE", state).replace("RESTART", restart)
    return text.replace("/ollama", f"/{name}", 1)


def survey(**sections: Any) -> Survey:
    case = Path(__file__).parents[1] / "facts" / "HostSurvey" / "factory_spark.yml"
    factory = yaml.safe_load(case.read_text())["sections"]
    own = {name.replace("_", "-"): lines for name, lines in sections.items()}
    return HostSurvey().process(output_of({**factory, **HEALTHY, **own}))


def problems(surveyed: Survey, **needs: Any) -> list[str]:
    return [str(p) for p in check_survey(dataclasses.replace(NEEDS, **needs), surveyed).problems]


def warnings(surveyed: Survey, **needs: Any) -> list[str]:
    return [str(p) for p in check_survey(dataclasses.replace(NEEDS, **needs), surveyed).warnings]


@dataclasses.dataclass
class Case:
    """Sections and the verdict: words of each problem and warning, split by `|`."""

    sections: dict[str, Any]
    problems: list[str] | None = dataclasses.field(default_factory=list)
    warnings: list[str] | None = None
    needs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        surveyed = survey(**self.sections)
        _compare(self.problems, problems(surveyed, **self.needs))
        _compare(self.warnings, warnings(surveyed, **self.needs))


def _compare(expected: list[str] | None, messages: list[str]) -> None:
    if expected is None:
        return
    assert len(messages) == len(expected), messages
    for words, message in zip(expected, messages, strict=True):
        assert [word for word in words.split("|") if word not in message] == [], message
