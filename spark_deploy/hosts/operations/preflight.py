"""Refuse a host before anything is changed on it, and stop what we were allowed to stop."""

from __future__ import annotations

import shlex
from typing import Any

from pyinfra.api.operation import operation
from pyinfra.context import host, state

from spark_deploy.hosts.facts.fact_cache import answers_of, read
from spark_deploy.hosts.facts.network import Reach
from spark_deploy.hosts.facts.survey import HostSurvey, Survey
from spark_deploy.hosts.operations.commands import is_predicted, log
from spark_deploy.hosts.operations.host_errors import Commands, Refused, host_errors, show
from spark_deploy.hosts.operations.prefetch import ask
from spark_deploy.hosts.preflight import judge
from spark_deploy.hosts.preflight.fabric import judge_ways, same_host_key, unlike
from spark_deploy.hosts.preflight.workloads import in_the_way
from spark_deploy.plan.machine import NeedsPlan


def question(needs: NeedsPlan) -> dict[str, Any]:
    """Build the arguments of the survey."""
    return {
        "paths": tuple(path for path, _ in needs.disk_needed_bytes),
        "ports_wanted": needs.ports,
        "images": needs.images,
        "shared_paths": (needs.docker_dir,),
        "look_in": needs.look_in,
    }


def survey_of(needs: NeedsPlan) -> Survey:
    """Look at the host once for all operations of preflight."""
    # The survey finds its own way to root; with pyinfra's sudo it would stop at a prompt.
    return read(HostSurvey, _sudo=False, **question(needs))


@operation()
@host_errors
def fit_host(needs: NeedsPlan) -> None:
    """Let the run go on only on a host that fits ``needs``; show all that is wrong at once."""
    if is_predicted("reboot"):
        host.noop("judged after the reboot")
        return
    survey = survey_of(needs)
    verdict = judge(needs, survey)
    if verdict.problems:
        raise Refused(*verdict.problems)
    if state.is_executing:
        twins = same_host_key(answers_of(HostSurvey))
        for warning in (*verdict.warnings, *(p for name, p in twins.items() if name == host.name)):
            show(host, f"warning: {warning}", colour="yellow")
    ask()
    if survey.stubbed:
        log(f"stubbed on this host: {', '.join(survey.stubbed)}")
    host.noop("the host fits the plan")


@operation()
@host_errors
def fit_fabric(needs: NeedsPlan) -> None:
    """Let the run go on only where the members of a cluster reach each other and are alike."""
    if not needs.cluster:
        host.noop("serves by itself")
        return
    asked = tuple((way.interface, way.address, way.mtu) for way in needs.ways)
    reached: dict[str, str] = read(Reach, _sudo=False, ways=asked)
    verdict = judge_ways(host.name, needs.ways, reached)
    problems = [*verdict.problems, *unlike(needs.cluster, answers_of(HostSurvey))]
    if problems:
        raise Refused(*problems)
    for warning in verdict.warnings if state.is_executing else ():
        show(host, f"warning: {warning}", colour="yellow")
    host.noop("the members reach each other")


@operation()
@host_errors
def taken_over(needs: NeedsPlan) -> Commands:
    """Stop the engine containers of ``takeover`` and keep docker from starting them again.

    They are not removed: `docker update --restart=unless-stopped NAME; docker start NAME` brings
    one back.
    """
    names = [c.name for c in in_the_way(survey_of(needs).containers) if c.name in needs.takeover]
    if not names:
        host.noop("no container to take over")
        return
    for name in names:
        log(f"stopping container {name} (takeover)")
        quoted = shlex.quote(name)
        yield f"docker update --restart=no {quoted} && docker stop {quoted}"
