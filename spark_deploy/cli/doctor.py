"""``spark-deploy doctor``: judge hosts as a deploy would, and change nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from pyinfra.api.host import Host
from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli import plan_summary
from spark_deploy.cli.hosts import Target, build_plan, select_hosts
from spark_deploy.cli.options import FILE, Options, shared_options
from spark_deploy.cli.query_hosts import Answer, query
from spark_deploy.cli.report import HostReport, plain_data, write_report
from spark_deploy.cli.report_contents import HostData, host_report, read_host
from spark_deploy.cli.terminal import note, print_result
from spark_deploy.config.checkout import page
from spark_deploy.config.errors import LockError, Problem
from spark_deploy.hosts.capacity import competing_containers
from spark_deploy.hosts.preflight import fact_arguments, judge, same_host_key
from spark_deploy.hosts.status import stopped_text
from spark_deploy.hosts.survey import HostSurvey, Survey
from spark_deploy.plan.machine import NeedsPlan
from spark_deploy.plan.memory import gib


@click.command
@click.option("--report", "is_report", is_flag=True, help="Write a redacted JSON report instead.")
@click.option("--out", metavar="FILE", type=FILE, help="Report file [spark-report-TIME.json].")
@shared_options(plans=True)
def doctor(options: Options, is_report: bool, out: str | None) -> int:
    """Exit with 1 if a deploy would refuse a host."""
    hosts = select_hosts(options)
    if is_report:
        return report(options, hosts, Path(out) if out else None)
    needs = _needs(hosts)
    answers = query(hosts, lambda host, one: surveyed(host, needs[one.name]))
    surveys = {one.host.name: one.value for one in answers if one.value is not None}
    twins = same_host_key(surveys)
    found = [verdict_of(one, needs[one.host.name], twins) for one in answers]
    print_result(options, found, map(lines, found))
    return 0 if all(one["reachable"] and not one["problems"] for one in found) else 1


def report(options: Options, hosts: Sequence[Target], out: Path | None) -> int:
    """Write a redacted report of the hosts; 1 when one of them did not answer."""
    plans = {host.name: build_plan(host, estimate=True) for host in hosts}

    def read(host: Host, listed_host: Target) -> HostData | None:
        survey = surveyed(host, plans[listed_host.name].needs)
        return read_host(host, survey) if survey else None

    reports: list[HostReport] = []
    for found in query(hosts, read):
        name, number = found.host.name, len(reports) + 1
        if found.value is None:
            note(f"{name}: {found.problem}")
            continue
        local = name == "@local"
        reports.append(host_report(number, found.value, plans[name], MAIN_SERVICE, local=local))
        note(f"{name} is {reports[-1].name} in the report")
    if not reports:
        return 1
    document, path = write_report(tuple(reports), out)
    summary = map(_report_summary, reports)
    print_result(options, {"file": str(path), **plain_data(document)}, [[line] for line in summary],
           between="\n")  # fmt: skip
    note(f"{path}: read it before you send it ({page('reports')})")
    return 0 if len(reports) == len(hosts) else 1


def _report_summary(host: HostReport) -> str:
    states = [answer.state for answer in host.answers]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("yes", "no", "open"))
    stubs = "; stand-ins of the virtual lab, not a Spark" if host.stand_ins else ""
    return f"{host.name}: {counts} of {len(states)} questions{stubs}"


def _needs(hosts: Sequence[Target]) -> dict[str, NeedsPlan]:
    """Return what a deploy would demand; sizes are estimated once the hub could not be asked."""
    found, estimate = dict[str, NeedsPlan](), False
    for host in hosts:
        try:
            found[host.name] = build_plan(host, estimate=estimate).needs
        except LockError as error:
            note(f"{error.problems[0]}\ngoing on with estimated sizes")
            estimate = True
            found[host.name] = build_plan(host, estimate=True).needs
    return found


def surveyed(host: Host, needs: NeedsPlan) -> Survey | None:
    """Look at a host without changing it."""
    found: Survey | None = host.get_fact(
        HostSurvey,
        # The survey finds its own way to root, so a host that still wants a password is seen too.
        _sudo=False,
        **fact_arguments(needs),
    )
    return found


def verdict_of(
    said: Answer[Survey], needs: NeedsPlan, twins: Mapping[str, Problem]
) -> dict[str, Any]:
    """Return the verdict on one host as plain data."""
    survey = said.value
    if survey is None:
        return {**said.data(), "problems": [], "warnings": []}
    verdict = judge(needs, survey)
    return {
        **said.data(),
        "problems": [_plain(problem) for problem in verdict.problems],
        "warnings": [
            _plain(problem)
            for problem in (*verdict.warnings, twins.get(said.host.name))
            if problem is not None
        ],
        "stubbed": list(survey.stubbed),
        "looks": dict(_looks(survey, needs)),
        "stopped": {name: stopped_text(name, one) for name, one in survey.stopped.items()},
        "move": moving(said.host.name, survey, needs),
    }


def moving(host: str, survey: Survey, needs: NeedsPlan) -> list[str]:
    """Return the commands that put this project in the place of other engines; none without."""
    others = competing_containers(survey.containers, [*needs.takeover, *needs.allow_containers])
    if not others:
        return []
    names = json.dumps([one.name for one in others])
    return [
        f"spark-deploy up {host} --data {shlex.quote(f'takeover={names}')}",
        f"spark-deploy connect {host}",
    ]


def lines(one: dict[str, Any]) -> Iterator[str]:
    """Yield the verdict on one host as lines for people."""
    if not one["reachable"]:
        yield f"{one['host']}: {one['problem']}"
        return
    count, stopped = len(one["problems"]), one["stopped"]
    leaves = f", and leave {' and '.join(stopped)} stopped" if stopped else ""
    yield f"{one['host']}: " + (
        f"a deploy would refuse it for {count} reason{'s' if count > 1 else ''}"
        if count
        else f"a deploy would go ahead{leaves}"
    )
    for text in stopped.values():
        yield f"  stopped   {text}"
    for title, text in one["looks"].items():
        yield f"  {title:<9} {text}"
    for word, key in (("REFUSED", "problems"), ("warning", "warnings")):
        for problem in one[key]:
            yield f"  {word:<9} {problem['where']}: {problem['what']}"
            yield f"  {'':<9} fix: {problem['fix']}"
    for title, command in zip(("move", "then"), one["move"], strict=False):
        yield f"  {title:<9} {command}"
    if one["stubbed"]:
        yield f"  stand-ins {', '.join(one['stubbed'])}: this says nothing of a Spark"


def _looks(survey: Survey, needs: NeedsPlan) -> Iterator[tuple[str, str]]:
    identity, gpu, memory = survey.identity, survey.gpu, survey.memory
    yield "system", f"{identity.os_id} {identity.os_version} on {identity.arch}"
    names = ", ".join(one.name for one in gpu.gpus) or "none seen"
    yield "gpu", f"{names}, driver {gpu.driver_version or 'not answering'}"
    yield (
        "memory",
        f"{gib(memory.available_bytes)} of {gib(memory.total_bytes)} available, the engine needs "
        f"{gib(needs.memory_needed_bytes)}",
    )
    if memory.blocks is not None:
        yield "blocks", str(memory.blocks)
    if memory.driver_failures:
        yield (
            "driver",
            f"failed to allocate memory {memory.driver_failures} times since the boot "
            "(NV_ERR_NO_MEMORY); reboot the host if a start fails",
        )
    yield "serving", ", ".join(survey.serving) or "nothing of ours"
    if others := competing_containers(survey.containers):
        yield "others", ", ".join(f"{one.name} ({one.image}, {one.state})" for one in others)
    if reused := plan_summary.told(plan_summary.reused(survey.stored, needs)):
        yield "reuse", reused


def _plain(problem: Problem) -> dict[str, str]:
    return {"where": problem.where, "what": problem.what, "fix": problem.fix}
