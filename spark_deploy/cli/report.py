"""``spark-deploy report``: what hosts show, in one redacted file that may be sent to others."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pyinfra.api.host import Host
from spark_contract import files
from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli.hosts import listed, planned, say
from spark_deploy.cli.options import Options
from spark_deploy.cli.query_hosts import look
from spark_deploy.cli.report_document import HostReport, Report, file_of
from spark_deploy.cli.report_gather import Said, host_report
from spark_deploy.config.catalog.load import read_questions
from spark_deploy.config.checkout import page
from spark_deploy.config.documents.declare import typed
from spark_deploy.hosts.facts.releases import Evidence, Status
from spark_deploy.hosts.facts.survey import HostSurvey
from spark_deploy.hosts.operations.preflight import question
from spark_deploy.plan.types import HostPlan


def run(options: Options) -> int:
    """Write the report of the chosen hosts; 1 when one of them could not be asked."""
    hosts = listed(options)
    plans = {one.name: planned(one, estimate=True) for one in hosts}
    answers = look(hosts, lambda host, one: _ask(host, plans[one.name]))
    told: list[HostReport] = []
    for one in answers:
        if one.value is None:
            say(f"{one.host.name}: {one.problem}")
            continue
        local = one.host.name == "@local"
        number = len(told) + 1
        told.append(host_report(number, one.value, plans[one.host.name], MAIN_SERVICE, local=local))
        say(f"{one.host.name} is {told[-1].name} in the report")
    if not told:
        return 1
    at = datetime.now(timezone.utc)
    report = Report(1, at.strftime("%Y-%m-%dT%H:%M:%SZ"), _version(), tuple(told))
    path = Path(options.out or f"spark-report-{at:%Y%m%d-%H%M%S}.md")
    files.write_text(path, file_of(report, read_questions()))
    _tell(options, report, path)
    return 0 if len(told) == len(hosts) else 1


def _ask(host: Host, plan: HostPlan) -> Said | None:
    survey = host.get_fact(HostSurvey, _sudo=False, **question(plan.needs))
    if survey is None:
        return None
    return Said(survey, host.get_fact(Status), host.get_fact(Evidence))


def _tell(options: Options, report: Report, path: Path) -> None:
    if options.json:
        print(json.dumps({"file": str(path), **typed(report)}))
        return
    for host in report.hosts:
        states = [answer.state for answer in host.answers]
        counts = ", ".join(f"{states.count(word)} {word}" for word in ("yes", "no", "open"))
        stubs = "; stand-ins, this says nothing of a Spark" if host.stand_ins else ""
        print(f"{host.name}: {counts} of {len(states)} questions{stubs}")
    print(f"{path}: read it, then send it ({page('reports')})")


def _version() -> str:
    try:
        return version("dgx-spark-deploy")
    except PackageNotFoundError:
        return "of a checkout"
