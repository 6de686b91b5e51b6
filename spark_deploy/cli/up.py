"""``spark-deploy up``: from an SSH login to a proven server, and from one choice to another.

Bootstraps what needs it, says what will happen, asks once, runs exactly the pyinfra line it prints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
from pyinfra.api.host import Host
from pyinfra.connectors.sshuserclient.client import get_host_keys
from rich.console import Console
from rich.text import Text
from spark_contract import tool
from spark_contract.documents import DocumentError, parse
from spark_contract.job import CHECKPOINT_JOB, FETCH_JOB, IMAGE_JOBS, Job
from spark_contract.records import Rollout
from spark_contract.release import service_of
from spark_contract.status import UnderWay
from spark_contract.tool import COMPILING
from spark_contract.units import MAIN_SERVICE, PREPARE

from spark_deploy.cli import run_pyinfra, update
from spark_deploy.cli.hosts import Target, build_plan, select_hosts
from spark_deploy.cli.options import Options, shared_options
from spark_deploy.cli.progress_screen import PHASES, lay, minutes
from spark_deploy.cli.query_hosts import Answer, check_access, query
from spark_deploy.cli.terminal import note
from spark_deploy.config.errors import SparkError
from spark_deploy.hosts.payload import read_payload
from spark_deploy.hosts.status import HostStatus, Jobs, JobStates, Status
from spark_deploy.inventory.login import public_key
from spark_deploy.lock.file import read_lock
from spark_deploy.lock.resolve import size, wanted_by
from spark_deploy.plan.jobs import jobs_of
from spark_deploy.plan.types import HostPlan


def rollout_text(status: HostStatus, there: UnderWay) -> str:
    """Say which rollout a host carries out, since when, and how far it is."""
    release = status.release(there.release)
    what = f"{release.model} with {release.profile}" if release else there.release
    since = f" since {there.since}" if there.since else ""
    phase = there.phase or "waiting"
    return f"rollout of {what} is under way{since} ({PHASES.get(phase, phase)})"


# While these go on nobody is answered; a rollout tells how long each took.
_DOWN = ("stop", "memory", "start", "check", "open")


@dataclass(frozen=True, slots=True)
class Found:
    """What a host says that decides how much there is to do."""

    status: HostStatus
    jobs: Jobs
    last: Rollout | None  # how the last rollout went of what it serves, or is to serve


def found_on(hosts: Sequence[Target], plans: dict[str, HostPlan]) -> list[Answer[Found]]:
    """Ask every host at the same time."""
    return query(hosts, lambda host, one: _ask(host, plans[one.name]))


def _ask(host: Host, plan: HostPlan) -> Found:
    names = tuple(job.digest12 for job in _jobs(plan))
    status = host.get_fact(Status)
    jobs = host.get_fact(JobStates, jobs=names, target=PREPARE.of(plan.serve.name))
    service = status.service(MAIN_SERVICE)
    # Nothing is known of a host without our tools, and it has none to ask.
    before = (service.active or service.good or plan.serve.name) if service else None
    return Found(status, jobs, _last_rollout(host, before) if before else None)


def _last_rollout(host: Host, release: str) -> Rollout | None:
    ok, said = host.run_shell_command(
        tool.line(tool.SWITCH_POLL, release), _sudo=host.data.get("_sudo")
    )
    try:
        return parse(Rollout, said.stdout) if ok else None
    except DocumentError:  # of other tools; only a figure is lacking
        return None


def _jobs(plan: HostPlan) -> list[Job]:
    return [work.job for work in jobs_of(plan, read_payload().image_context)]


def sentence(plan: HostPlan, said: Answer[Found]) -> dict[str, Any]:
    """Return the forecast of one host: a sentence, and whether anything would change."""
    found = said.value
    if found is None:
        return {**said.data(), "text": said.problem, "changes": True}
    why = found.status.unproven(MAIN_SERVICE, plan.serve.name)
    stopped = found.status.stopped(MAIN_SERVICE)
    text = f"{plan.model} with {plan.profile} is served and proven; nothing of it changes"
    under_way = found.status.rollout(MAIN_SERVICE)
    if stopped:
        text = stopped
    elif why and under_way:
        text = _attached(plan, found.status, under_way)
    elif why:
        text = "; ".join(_parts(plan, found))
    beside = list(_beside(plan, found.status))
    changes = bool(beside) or (bool(why) and not stopped)
    return {**said.data(), "text": "; ".join([text, *beside]), "changes": changes}


def _attached(plan: HostPlan, status: HostStatus, there: UnderWay) -> str:
    """Say what becomes of this run where the host is carrying out a rollout already."""
    text = rollout_text(status, there)
    if there.release == plan.serve.name:
        return f"{text}; this run attaches to it"
    wanted = f"{plan.model} with {plan.profile}"
    return f"{text}; until it ends a change to {wanted} is refused: run again then"


def _beside(plan: HostPlan, status: HostStatus) -> Iterator[str]:
    """Say what becomes of the services beside the main one."""
    planned = {one.serve.service: one for one in plan.services}
    for name, one in planned.items():
        if status.unproven(name, one.serve.name) and not status.stopped(name):
            yield f"service {name}: will serve {one.model} with {one.profile}"
    for name, there in (status.told.services if status.told else {}).items():
        if name not in (MAIN_SERVICE, *planned) and (there.active or there.enabled):
            yield f"service {name}: is listed no more and stops"


def _parts(plan: HostPlan, found: Found) -> Iterator[str]:
    service = found.status.service(MAIN_SERVICE)
    old = found.status.release(service.active) if service else None
    if not found.status.installed:
        yield f"new here: will serve {plan.model} with {plan.profile}"
    elif old is None:
        yield f"serves nothing now: {plan.model} with {plan.profile}"
    elif old.name == plan.serve.name:
        yield f"{plan.model} with {plan.profile} stays, to be proven again"
    else:
        yield _change((old.model, old.profile), (plan.model, plan.profile))
    yield from _work(plan, found.jobs)
    if old is None:
        yield f"then the engine starts{_first(plan, found)}"
    elif old.name != plan.serve.name:
        yield f"engine restarts; clients get 503 for {_down(found.last)}"
    if (old is None or old.name != plan.serve.name) and _compiles(plan, found):
        yield f"plus {COMPILING}"


def _compiles(plan: HostPlan, found: Found) -> bool:
    """Whether no proven release of the service has compiled for this engine and driver."""
    releases = found.status.told.releases if found.status.told else ()
    caches = {one.cache for one in releases if service_of(one.name) == plan.serve.service}
    return not plan.serve.check.portable and plan.cache_dir not in caches


def _first(plan: HostPlan, found: Found) -> str:
    """Say how long a start takes where nothing runs, or why that is not known."""
    last, release = found.last, found.status.release(plan.serve.name)
    if last and last.state == "switched" and "start" in last.times_s:
        return f", which takes {_down(last)}"
    if release and release.proof:
        return " again: how long that took is not kept"
    return " for the first time: no figure yet of how long that takes"


def _change(old: tuple[str, str], new: tuple[str, str]) -> str:
    if old == new:
        return f"{new[0]} with {new[1]} as before, with other settings"
    if old[0] == new[0]:
        return f"{old[1]} → {new[1]} ({new[0]})"
    return f"{old[0]} with {old[1]} → {new[0]} with {new[1]}"


def _work(plan: HostPlan, jobs: Jobs) -> Iterator[str]:
    """Say what is not prepared yet; what a job has already is not fetched again."""
    todo = [job for job in _jobs(plan) if not jobs.done([job.digest12])]
    fetches = sum(_left_bytes(job, jobs) for job in todo if job.kind == FETCH_JOB)
    image = plan.image.size_bytes if any(job.kind in IMAGE_JOBS for job in todo) else 0
    if not todo:
        yield "nothing to download"
    if fetches or image:
        parts = [f"{size(fetches)} of files"] * bool(fetches)
        parts += [f"an image of {size(image)}"] * bool(image)
        yield f"fetches {' and '.join(parts)}"
    if any(job.kind == CHECKPOINT_JOB for job in todo):
        yield "builds the checkpoint"


def _left_bytes(job: Job, jobs: Jobs) -> int:
    state = jobs.states.get(job.digest12)
    there = (state.progress.bytes or 0) if state and state.progress else 0
    return max(0, (job.total_bytes or 0) - there)


def _down(last: Rollout | None) -> str:
    took_s = sum(last.times_s.get(phase, 0.0) for phase in _DOWN) if last else 0.0
    if not took_s:
        return "as long as an engine takes to load"
    rough = f"about {took_s / 60:.0f} minutes" if took_s >= 90 else "about a minute"
    return f"{rough} (the last start took {minutes(took_s)})"


@click.command
@shared_options(plans=True, changes=True)
def up(options: Options) -> int:
    """Deploy the chosen hosts; exit with pyinfra's code."""
    hosts = select_hosts(options)
    named = [host.name for host in hosts] if options.limit or options.exclude else []
    flags = ["--dry"] if options.dry else ["-y"]
    words = run_pyinfra.line("up", options, named, flags)
    if code := _bootstrapped(hosts, options):
        return code
    if not options.dry:
        _lock(hosts, options)
    plans = {host.name: build_plan(host) for host in hosts}
    told = [sentence(plans[one.host.name], one) for one in found_on(hosts, plans)]
    if options.json:
        print(json.dumps(told, indent=1))
    else:
        console = Console(highlight=False)
        for one, host in zip(told, hosts, strict=True):
            lay(Text.assemble((host.name, "bold"), f": {one['text']}"), console)
            for warning in plans[host.name].warnings:
                lay(Text(f"  WARNING {warning}", "yellow"), console)
    if options.dry and not options.verbose:
        note("nothing was done; to see every single step, run:")
        run_pyinfra.show(words)
        return 0 if all(one["reachable"] for one in told) else 1
    if not options.dry:
        # Where what is served stays, something else of a host may still be mended.
        run_pyinfra.agreed(options.yes, "Go on?")
    run_pyinfra.show(words)
    return run_pyinfra.deploy("up", hosts, options)


def _bootstrapped(hosts: Sequence[Target], options: Options) -> int:
    """Install key and sudo rule where they are missing; asks for the password, once.

    Raises:
        SparkError: no host can be reached, or one does not know our key and nobody shall ask, or
            there is no key to let in.
    """
    found = check_access(hosts)
    if found.silent and len(found.silent) == len(hosts):
        raise SparkError(list(found.problems()))
    if not found.closed:
        return 0
    for one in found.closed:
        if not one.is_local:
            public_key(one.key_file)  # said by itself, and not in the middle of pyinfra's words
    new = [one.host for one in found.closed]
    if options.dry:
        fix = "run `spark-deploy up` without --dry"
        raise SparkError.one(", ".join(new), "the SSH key or the sudo rule is missing", fix)
    note(f"{', '.join(new)}: key or sudo rule is missing; the password is asked for once")
    options = replace(options, limit=new, exclude=[], verbose=True)
    run_pyinfra.show(run_pyinfra.line("bootstrap", options, new, ["-y"]))
    # The inventory asks for the password.
    closed = select_hosts(options, deploy=run_pyinfra.deploy_file("bootstrap"))
    code = run_pyinfra.deploy("bootstrap", closed, options)
    get_host_keys.cache.clear()  # what was just recorded counts from now on
    return code


def _lock(hosts: Sequence[Target], options: Options) -> None:
    """Write down what names stand for, so that what is said is what is done."""
    missing = (
        wanted_by(host.settings.settings, host.catalog).missing_in(
            read_lock(host.settings.lock_path)
        )
        for host in hosts
    )
    if any(one.names for one in missing):
        update.lock_names(options, missing=True)
