"""``spark-deploy up``: bootstrap new hosts, print the changes, confirm, deploy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
from spark_contract.release import parse_service
from spark_contract.status import RunningRollout
from spark_contract.tool import COMPILING
from spark_contract.units import MAIN_SERVICE, PREPARE

from spark_deploy.cli import changes, update
from spark_deploy.cli.clients import QUESTION
from spark_deploy.cli.connect import ask_host, hosts_for_clients, make_connections
from spark_deploy.cli.console import Options, next_command, note, print_problem, shared_options
from spark_deploy.cli.hosts import Answer, Target, build_plan, check_access, query, select_hosts
from spark_deploy.cli.progress_screen import PHASES, format_duration, print_text
from spark_deploy.cli.settings import apply_choice, edit_line
from spark_deploy.config.errors import SparkError, one_line
from spark_deploy.hosts.payload import read_payload
from spark_deploy.hosts.status import HostStatus, Jobs, JobStates, Status
from spark_deploy.inventory.login import find_public_key
from spark_deploy.lock.resolve import format_size, read_lock, required_names
from spark_deploy.plan.jobs import plan_jobs
from spark_deploy.plan.types import HostPlan

# Phases of a rollout in which clients get 503; the host records their times.
_DOWNTIME_PHASES = ("stop", "memory", "start", "check", "open")


@click.command
@shared_options(plans=True, changes=True)
def up(options: Options) -> int:
    hosts = select_hosts(options)
    limit = [host.name for host in hosts] if options.limit or options.exclude else []
    flags = ["--dry"] if options.dry else ["-y"]
    argv = changes.pyinfra_command("up", options, limit, flags)
    if code := _bootstrap(hosts, options):
        return code
    if not options.dry and any(map(_has_unlocked_names, hosts)):
        update.lock_names(options, only_missing=True)
    plans = {host.name: build_plan(host) for host in hosts}
    answers = query(hosts, lambda host, target: read_state(host, plans[target.name]))
    previews = _print_previews(hosts, plans, answers, options)
    choice = _temporary_choice(options)
    if choice:
        note(f"{choice} applies only to this run, because your settings files select another")
    if options.dry and not options.verbose:
        changes.note_no_changes(argv)
        return 0 if all(host_preview["reachable"] for host_preview in previews) else 1
    if not options.dry:
        # Even if the release is unchanged, a deploy may repair a host.
        changes.confirm(options, "Continue?")
    changes.print_command(argv)
    failed: set[str] = set()
    code = changes.deploy("up", hosts, options, failed=failed)
    if code == 0 and not options.dry:
        update.lock_donor_tensors(hosts)
    was_deployed = code == 0 or (code == 1 and failed)  # at least to some hosts
    if was_deployed and not options.dry and not options.json:
        chat_hosts = _chat_hosts(hosts, plans, answers)
        _print_answers([host for host in chat_hosts if host.name not in failed], options)
    if code == 0 and choice and not options.dry:
        _offer_to_save(choice, options)
    return code


def _has_unlocked_names(host: Target) -> bool:
    required = required_names(host.settings, host.catalog)
    return bool(required.missing_in(read_lock(host.loaded.lock_path)).names)


def _print_previews(
    hosts: Sequence[Target],
    plans: Mapping[str, HostPlan],
    answers: Sequence[Answer[HostState]],
    options: Options,
) -> list[dict[str, Any]]:
    if options.json and not options.dry:
        # Fail before printing anything: a later error would be a second JSON document.
        changes.check_confirmable(options)
    previews = [preview(plans[answer.host.name], answer) for answer in answers]
    if options.json:
        print(json.dumps(previews, indent=1))
        return previews
    console = Console(highlight=False)
    for host_preview, host in zip(previews, hosts, strict=True):
        print_text(Text.assemble((host.name, "bold"), f": {host_preview['text']}"), console)
        for warning in plans[host.name].warnings:
            print_text(Text(f"  WARNING {warning}", "yellow"), console)
    return previews


def _chat_hosts(
    hosts: Sequence[Target], plans: Mapping[str, HostPlan], answers: Sequence[Answer[HostState]]
) -> list[Target]:
    """Return the hosts that serve a chat model and are not stopped."""
    stopped = {
        answer.host.name
        for answer in answers
        if answer.value and answer.value.status.stop_message(MAIN_SERVICE)
    }
    chat = {name for name, plan in plans.items() if plan.release.check.task == "chat"}
    return [host for host in hosts if host.name in chat - stopped]


def _temporary_choice(options: Options) -> str:
    """Return the command line's MODEL, PROFILE or MODEL/PROFILE; "" if settings files select it."""
    if not options.choice:
        return ""
    hosts = select_hosts(replace(options, model=None, profile=None), must_serve=False)
    is_saved = all(
        getattr(host.settings, key) == value
        for host in hosts
        for key, value in options.choice.items()
    )
    return "" if is_saved else "/".join(options.choice.values())


def _offer_to_save(choice: str, options: Options) -> None:
    options = replace(options, model=None, profile=None)
    command = next_command(options, "use", choice, *options.limit)
    if options.yes or not sys.stdin.isatty():
        note(f"to keep this choice, run `{command}`")
    elif click.confirm(f"Write this choice to your settings files ({command})?", err=True):
        edits, _ = apply_choice(options, choice)
        for edit in edits:
            note(edit_line(edit))


def _print_answers(hosts: list[Target], options: Options) -> None:
    try:
        answering = hosts_for_clients(hosts, options, None) if hosts else []
    except SparkError:  # the hosts are workers of a cluster, which do not answer clients
        return
    for host, server in zip(answering, make_connections(answering, options), strict=True):
        condition = ""
        if server.tunnel:
            command = next_command(options, "connect", host.name, "--tunnel")
            condition = f" while `{command}` runs"
        print(f"{host.name}: {server.base_url}{condition}")
        _print_answer(host, options)


def _print_answer(host: Target, options: Options) -> None:
    """Send a question to a host as a client on this machine would; print the answer."""
    try:
        result = ask_host(host, QUESTION, service=None, tokens=512, print_answer=False)
    except SparkError as error:  # the check passed, but this machine cannot reach the gateway
        note(f"{host.name}: did not answer a question from this machine:", "yellow")
        for problem in error.problems:
            print_problem(problem)
        return
    answer = one_line(result["answer"] or "(the token limit was reached during reasoning)")
    print(f"  asked {QUESTION!r}, answered {answer!r} at {result['tokens_per_s']} tok/s")
    print(f"  clients: {next_command(options, 'connect', host.name)}")


def _bootstrap(hosts: Sequence[Target], options: Options) -> int:
    """Bootstrap the hosts that lack our SSH key or sudo rule; return the exit code."""
    access = check_access(hosts)
    if access.unreachable and len(access.unreachable) == len(hosts):
        raise SparkError(list(access.problems()))
    if not access.without_access:
        return 0
    for endpoint in access.without_access:
        if not endpoint.is_local:
            find_public_key(endpoint)  # if there is no key, fail before pyinfra starts
    names = [endpoint.host for endpoint in access.without_access]
    if options.dry:
        fix = "run `spark-deploy up` without --dry"
        raise SparkError.single(", ".join(names), "SSH key or sudo rule is missing", fix)
    note(f"{', '.join(names)}: the SSH key or sudo rule is missing; enter the password once")
    options = replace(options, limit=names, exclude=[], verbose=True)
    changes.print_command(changes.pyinfra_command("bootstrap", options, names, ["-y"]))
    # For this deploy, the inventory prompts for the password.
    targets = select_hosts(options, deploy=changes.deploy_file("bootstrap"))
    code = changes.deploy("bootstrap", targets, options)
    get_host_keys.cache.clear()  # pyinfra must read the newly recorded host keys
    return code


@dataclass(frozen=True, slots=True)
class HostState:
    status: HostStatus
    jobs: Jobs
    last_rollout: Rollout | None  # to the active, last known-good or planned release


def read_state(host: Host, plan: HostPlan) -> HostState:
    """Read a host's status, the states of planned jobs and the last rollout."""
    digests = tuple(job.digest12 for job in _planned_jobs(plan))
    status = host.get_fact(Status)
    jobs = host.get_fact(JobStates, jobs=digests, target=PREPARE.unit(plan.release.name))
    last_rollout = None
    if service := status.service(MAIN_SERVICE):  # hosts without our tools have no rollouts
        release = service.active or service.known_good or plan.release.name
        ok, output = host.run_shell_command(
            tool.command_line(tool.SWITCH_POLL, release), _sudo=host.data.get("_sudo")
        )
        # Another version of the host tools may print another document.
        with suppress(DocumentError):
            last_rollout = parse(Rollout, output.stdout) if ok else None
    return HostState(status, jobs, last_rollout)


def _planned_jobs(plan: HostPlan) -> list[Job]:
    return [work.job for work in plan_jobs(plan, read_payload().image_context)]


def preview(plan: HostPlan, answer: Answer[HostState]) -> dict[str, Any]:
    """Return the expected changes of a host as text, and whether there are changes."""
    state = answer.value
    if state is None:
        return {**answer.data(), "text": answer.problem, "changes": True}
    unproven_reason = state.status.unproven_reason(MAIN_SERVICE, plan.release.name)
    stopped = state.status.stop_message(MAIN_SERVICE)
    rollout = state.status.rollout(MAIN_SERVICE)
    text = f"already serves {plan.model} with {plan.profile}, which passed its check"
    if stopped:
        text = stopped
    elif unproven_reason and rollout:
        text = f"{rollout_text(state.status, rollout)}; this run attaches to it"
        if rollout.release != plan.release.name:
            text = (
                f"{rollout_text(state.status, rollout)}; run this command again after the rollout "
                f"to change to {plan.model} with {plan.profile}"
            )
    elif unproven_reason:
        text = "; ".join(_change_texts(plan, state))
    services = list(_service_changes(plan, state.status))
    will_change = bool(services) or (bool(unproven_reason) and not stopped)
    return {**answer.data(), "text": "; ".join([text, *services]), "changes": will_change}


def rollout_text(status: HostStatus, rollout: RunningRollout) -> str:
    release = status.release(rollout.release)
    target = f"{release.model} with {release.profile}" if release else rollout.release
    since = f" since {rollout.since}" if rollout.since else ""
    phase = rollout.phase or "waiting"
    return f"rollout of {target} in progress{since} ({PHASES.get(phase, phase)})"


def _service_changes(plan: HostPlan, status: HostStatus) -> Iterator[str]:
    planned = {service.release.service: service for service in plan.services}
    for name, service in planned.items():
        if status.unproven_reason(name, service.release.name) and not status.stop_message(name):
            yield f"service {name}: will serve {service.model} with {service.profile}"
    for name, running in (status.report.services if status.report else {}).items():
        if name not in (MAIN_SERVICE, *planned) and (running.active or running.enabled):
            yield f"service {name}: will stop, because the settings no longer list it"


def _change_texts(plan: HostPlan, state: HostState) -> Iterator[str]:
    new = f"{plan.model} with {plan.profile}"
    service = state.status.service(MAIN_SERVICE)
    old = state.status.release(service.active) if service else None
    if not state.status.installed:
        yield f"new host: will serve {new}"
    elif old is None:
        yield f"serves nothing now; will serve {new}"
    elif old.name == plan.release.name:
        yield f"{new} keeps running and will be checked again"
    elif (old.model, old.profile) == (plan.model, plan.profile):
        yield f"{new} with changed settings"
    elif old.model == plan.model:
        yield f"{old.profile} → {plan.profile} ({plan.model})"
    else:
        yield f"{old.model} with {old.profile} → {new}"
    yield from _preparation_texts(plan, state.jobs)
    if old is None:
        yield f"then the engine starts{_start_duration_text(plan, state)}"
    elif old.name != plan.release.name:
        yield f"engine restarts; clients get 503 for {_downtime_text(state.last_rollout)}"
    if (old is None or old.name != plan.release.name) and not plan.release.check.portable:
        releases = state.status.report.releases if state.status.report else ()
        service_name = plan.release.service
        compiled = {r.cache for r in releases if parse_service(r.name) == service_name}
        if plan.cache_dir not in compiled:
            yield f"plus {COMPILING}"


def _start_duration_text(plan: HostPlan, state: HostState) -> str:
    last, release = state.last_rollout, state.status.release(plan.release.name)
    if last and last.state == "switched" and "start" in last.times_s:
        return f", which takes {_downtime_text(last)}"
    if release and release.proof:
        return " again (duration of the last start unknown)"
    return " for the first time (duration unknown)"


def _preparation_texts(plan: HostPlan, jobs: Jobs) -> Iterator[str]:
    pending = [job for job in _planned_jobs(plan) if not jobs.are_done([job.digest12])]
    if not pending:
        yield "nothing to download"
    missing_bytes = 0
    for job in pending:
        if job.kind == FETCH_JOB:
            state = jobs.states.get(job.digest12)
            fetched_bytes = (state.progress.bytes or 0) if state and state.progress else 0
            missing_bytes += max(0, (job.total_bytes or 0) - fetched_bytes)
    downloads = [f"{format_size(missing_bytes)} of files"] if missing_bytes else []
    if any(job.kind in IMAGE_JOBS for job in pending) and plan.image.size_bytes:
        downloads.append(f"an image of {format_size(plan.image.size_bytes)}")
    if downloads:
        yield f"downloads {' and '.join(downloads)}"
    if any(job.kind == CHECKPOINT_JOB for job in pending):
        yield "builds the checkpoint"


def _downtime_text(last: Rollout | None) -> str:
    seconds = sum(last.times_s.get(phase, 0.0) for phase in _DOWNTIME_PHASES) if last else 0.0
    if not seconds:
        return "as long as the engine takes to load"
    estimate = f"about {seconds / 60:.0f} minutes" if seconds >= 90 else "about a minute"
    return f"{estimate} (the last start took {format_duration(seconds)})"
