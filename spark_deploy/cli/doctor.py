"""``spark-deploy doctor``: run the checks of a deploy on hosts, without changes."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from pyinfra.api.host import Host
from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli.console import FILE, Options, note, print_result, shared_options
from spark_deploy.cli.hosts import Answer, Target, build_plan, query, query_or_note, select_hosts
from spark_deploy.cli.report import HostReport, report_data, write_report
from spark_deploy.cli.report_contents import HostData, host_report, read_host
from spark_deploy.config.errors import LockError
from spark_deploy.hosts.capacity import competing_containers
from spark_deploy.hosts.disk import StoredFiles
from spark_deploy.hosts.preflight import check_survey, fact_arguments, host_key_problems
from spark_deploy.hosts.status import stop_message
from spark_deploy.hosts.survey import HostSurvey, Survey
from spark_deploy.lock.resolve import format_size
from spark_deploy.plan.memory import gib
from spark_deploy.plan.types import PreflightPlan


@click.command
@click.option("--report", "as_report", is_flag=True, help="Write a redacted JSON report instead.")
@click.option(
    "--out", metavar="FILE", type=FILE, help="File for the report [spark-report-TIME.json]."
)
@shared_options(plans=True)
def doctor(options: Options, as_report: bool, out: str | None) -> int:
    """Return 1 if a deploy would reject any host."""
    hosts = select_hosts(options)
    if as_report:
        return _report(options, hosts, Path(out) if out else None)
    plans = _preflight_plans(hosts)
    answers = query(hosts, lambda host, target: read_survey(host, plans[target.name]))
    surveys = {answer.host.name: answer.value for answer in answers if answer.value}
    verdicts = [make_verdict(answer, plans[answer.host.name], surveys) for answer in answers]
    print_result(options, verdicts, map(verdict_lines, verdicts))
    return 0 if all(verdict["reachable"] and not verdict["problems"] for verdict in verdicts) else 1


def _report(options: Options, hosts: Sequence[Target], out: Path | None) -> int:
    plans = {host.name: build_plan(host, estimate=True) for host in hosts}

    def read(host: Host, target: Target) -> HostData | None:
        survey = read_survey(host, plans[target.name].preflight)
        return read_host(host, survey) if survey else None

    reports: list[HostReport] = []
    for host, data in query_or_note(hosts, read):
        number = len(reports) + 1
        is_local = host.name == "@local"
        reports.append(host_report(number, data, plans[host.name], MAIN_SERVICE, local=is_local))
        note(f"{host.name} is {reports[-1].name} in the report")
    if not reports:
        return 1
    report, path = write_report(tuple(reports), out)
    result = {"file": str(path), **report_data(report)}
    lines = []
    for entry in reports:
        states = [answer.state for answer in entry.answers]
        counts = ", ".join(f"{states.count(state)} {state}" for state in ("yes", "no", "open"))
        line = f"{entry.name}: {len(states)} questions, {counts}"
        if entry.stand_ins:
            line += "; the host uses stand-ins from the virtual lab and is not a Spark"
        lines.append(line)
    print_result(options, result, [lines])
    note(f"{path}: written; read the report before you send it")
    return 0 if len(reports) == len(hosts) else 1


def _preflight_plans(hosts: Sequence[Target]) -> dict[str, PreflightPlan]:
    """Return the preflight plan per host; estimate sizes if the hub does not answer."""
    try:
        return {host.name: build_plan(host, estimate=False).preflight for host in hosts}
    except LockError as error:
        note(f"{error.problems[0]}\nusing estimated sizes")
        return {host.name: build_plan(host, estimate=True).preflight for host in hosts}


def read_survey(host: Host, needs: PreflightPlan) -> Survey | None:
    # The survey itself calls sudo if sudo needs no password.
    survey: Survey | None = host.get_fact(HostSurvey, _sudo=False, **fact_arguments(needs))
    return survey


def make_verdict(
    answer: Answer[Survey], needs: PreflightPlan, surveys: Mapping[str, Survey]
) -> dict[str, Any]:
    survey, name = answer.value, answer.host.name
    if survey is None:
        return {**answer.data(), "problems": [], "warnings": []}
    findings = check_survey(needs, survey)
    warnings = [*findings.warnings, *host_key_problems(name, surveys)]
    return {
        **answer.data(),
        "problems": list(map(asdict, findings.problems)),
        "warnings": list(map(asdict, warnings)),
        "stubbed": list(survey.stubbed),
        "looks": dict(_survey_rows(survey, needs)),
        "stopped": {
            service: stop_message(service, marker)
            for service, marker in survey.stopped.items()
            if not marker.on_request
        },
        "move": takeover_commands(name, survey, needs),
    }


def takeover_commands(host: str, survey: Survey, needs: PreflightPlan) -> list[str]:
    containers = competing_containers(survey.containers, [*needs.takeover, *needs.allow_containers])
    if not containers:
        return []
    names = json.dumps([container.name for container in containers])
    return [
        f"spark-deploy up {host} --data {shlex.quote(f'takeover={names}')}",
        f"spark-deploy connect {host}",
    ]


def verdict_lines(verdict: dict[str, Any]) -> Iterator[str]:
    if not verdict["reachable"]:
        yield f"{verdict['host']}: {verdict['problem']}"
        return
    count, stopped = len(verdict["problems"]), verdict["stopped"]
    result = "would proceed"
    if count:
        result = f"would reject this host for {count} reason{'s' if count > 1 else ''}"
    elif stopped:
        result += f", and leave {' and '.join(stopped)} stopped"
    yield f"{verdict['host']}: a deploy {result}"
    for text in stopped.values():
        yield f"  stopped   {text}"
    for title, text in verdict["looks"].items():
        yield f"  {title:<9} {text}"
    for title, key in (("REFUSED", "problems"), ("warning", "warnings")):
        for problem in verdict[key]:
            yield f"  {title:<9} {problem['where']}: {problem['what']}"
            yield f"  {'':<9} fix: {problem['fix']}"
    for title, command in zip(("move", "then"), verdict["move"], strict=False):
        yield f"  {title:<9} {command}"
    if verdict["stubbed"]:
        yield f"  stand-ins {', '.join(verdict['stubbed'])}: not valid for a Spark"


def _survey_rows(survey: Survey, needs: PreflightPlan) -> Iterator[tuple[str, str]]:
    identity, gpu, memory = survey.identity, survey.gpu, survey.memory
    yield "system", f"{identity.os_id} {identity.os_version} on {identity.arch}"
    names = ", ".join(device.name for device in gpu.gpus) or "none"
    yield "gpu", f"{names}, driver {gpu.driver_version or 'does not respond'}"
    available, total = gib(memory.available_bytes), gib(memory.total_bytes)
    needed = gib(needs.memory_needed_bytes)
    yield "memory", f"{available} of {total} are available; the engine needs {needed}"
    if memory.blocks is not None:
        yield "blocks", str(memory.blocks)
    if memory.driver_failures:
        yield (
            "driver",
            f"{memory.driver_failures} memory allocations failed since boot (NV_ERR_NO_MEMORY); "
            "if an engine fails to start, reboot the host",
        )
    yield "serving", ", ".join(survey.serving) or "no managed service"
    if containers := competing_containers(survey.containers):
        engines = (f"{engine.name} ({engine.image}, {engine.state})" for engine in containers)
        yield "others", ", ".join(engines)
    if text := describe_reuse(find_reusable(survey.stored, needs)):
        yield "reuse", text


@dataclass(frozen=True, slots=True)
class Reuse:
    found_bytes: int
    whole_bytes: int
    folders: tuple[str, ...]  # by size, largest first


def find_reusable(stored: StoredFiles, needs: PreflightPlan) -> Reuse:
    wanted = {file for _, files in needs.downloads for file in files}
    present = {(sha256, size_bytes) for _, sha256, size_bytes in stored.files}
    bytes_in: dict[str, int] = {}
    for sha256, size_bytes in wanted & present:
        folder = stored.folders.get(sha256, "")
        bytes_in[folder] = bytes_in.get(folder, 0) + size_bytes
    folders = sorted(bytes_in, key=lambda folder: (-bytes_in[folder], folder))
    whole_bytes = sum(size_bytes for _, size_bytes in wanted)
    return Reuse(sum(bytes_in.values()), whole_bytes, tuple(filter(None, folders)))


def describe_reuse(reuse: Reuse) -> str:
    if not reuse.found_bytes:
        return ""
    where = f" found in {', '.join(reuse.folders)}" if reuse.folders else ""
    part, whole = format_size(reuse.found_bytes), format_size(reuse.whole_bytes)
    number, unit = part.split()
    if whole.endswith(f" {unit}"):  # print a common unit only once
        part = number
    return f"will reuse {part} of {whole}{where}; these files are not downloaded or moved"
