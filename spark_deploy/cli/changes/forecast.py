"""What a deploy would do to a host, in a sentence: from its plan and from what the host says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyinfra.api.host import Host
from spark_contract.documents import DocumentError, parse
from spark_contract.host import tool
from spark_contract.host.sentences import COMPILING
from spark_contract.host.units import MAIN_SERVICE, PREPARE
from spark_contract.serving.records import Rollout
from spark_contract.serving.release import service_of
from spark_contract.serving.status import UnderWay
from spark_contract.work.job import CHECKPOINT_JOB, FETCH_JOB, IMAGE_JOBS, Job

from spark_deploy.cli.changes.transcript import minutes
from spark_deploy.cli.changes.under_way import rollout_text
from spark_deploy.cli.hosts import Listed
from spark_deploy.cli.looking import Answer, look, plain_answer
from spark_deploy.facts.service.jobs import Jobs, JobStates
from spark_deploy.facts.service.serve import HostStatus, Status
from spark_deploy.lockfile.resolve import size
from spark_deploy.payload.content import read_payload
from spark_deploy.planning.types import HostPlan
from spark_deploy.planning.work.jobs import jobs_of

# While these go on nobody is answered; a rollout tells how long each took.
_DOWN = ("stop", "memory", "start", "check", "open")


@dataclass(frozen=True, slots=True)
class Found:
    """What a host says that decides how much there is to do."""

    status: HostStatus
    jobs: Jobs
    last: Rollout | None  # how the last rollout went of what it serves, or is to serve


def found_on(hosts: Sequence[Listed], plans: dict[str, HostPlan]) -> list[Answer[Found]]:
    """Ask every host at the same time."""
    return look(hosts, lambda host, one: _ask(host, plans[one.name]))


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
        return {**plain_answer(said), "text": said.problem, "changes": True}
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
    return {**plain_answer(said), "text": "; ".join([text, *beside]), "changes": changes}


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
