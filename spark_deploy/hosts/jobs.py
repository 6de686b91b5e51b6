"""Start jobs on a host and wait for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import gevent
from pyinfra.api.command import FunctionCommand
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host
from spark_contract.job import FETCH_JOB, Job, JobState
from spark_contract.paths import hub_token_file
from spark_contract.units import (
    BOOT_LINKS,
    JOB,
    PREPARE,
    RELEASE_NAME,
    UNITS_DIR,
    drop_in_dir,
)

from spark_deploy.hosts.commands import HEARTBEAT_S, log_once, run_reconnecting, shell
from spark_deploy.hosts.facts import find_answer, read_fact
from spark_deploy.hosts.files import pack_files, place_files, unpack_script
from spark_deploy.hosts.host_errors import Commands, host_errors, refuse
from spark_deploy.hosts.peer_download import with_known_peers
from spark_deploy.hosts.status import JobStates, parse_poll, poll_command, progress_text
from spark_deploy.lock.hub_token import read_hub_token
from spark_deploy.plan.jobs import Work
from spark_deploy.plan.managed_files import ManagedFile

# systemd on the host is the executor, so work goes on after the controller or the connection is
# gone and after a reboot; the next run attaches to whatever is there.
POLL_EVERY_S = 2.0


PREPARE_TIMEOUT_S = 6 * 3600  # a first download of 80 GB on a slow line


@operation()
@host_errors
def start_job(work: Work, release: str, names: tuple[str, ...]) -> Commands:
    """Have the job's proof on the host, or its work under way.

    Args:
        work: the job and its files.
        release: the prepare target of this release pulls the job in.
        names: every job of the release, so that one question serves all operations.
    """
    spec, target = work.job, PREPARE.of(release)
    found = read_fact(JobStates, jobs=names, target=target)
    state = found.states.get(spec.digest12)
    how = state.state if state else ""
    if how == "done":
        host.noop(f"{spec.title}: proven by its receipt")
        return
    boots = target in found.linked and spec.digest12 in found.pulled
    if how == "running":
        if boots:
            host.noop(f"{spec.title}: already running, attaching")
            return
        # Begun for another choice: from now on a boot goes on with it for this one.
        yield from place_files((_pulled_in(spec, release),))
        yield shell(_link(target))
        return
    if state is not None and state.state == "unknown":
        # Neither done nor missing: work begun on a guess would be told as a change.
        refuse(f"{host.name}: {spec.title}", progress_text(state), "run again when it answers")
    if spec.kind == FETCH_JOB and not host.state.is_executing:  # told once, before a dry run's end
        host.log(f"{spec.title}: not on this host, {spec.total_bytes or 0} bytes to fetch")
    yield from place_files((*with_known_peers(work).files(), _pulled_in(spec, release)))
    token = [*_token(work)]
    yield shell(
        f"{_link(target)}; "
        # What an earlier attempt left would read as the outcome of this one.
        f"rm -f {spec.dir}/status.json {spec.dir}/progress; "
        f"systemctl reset-failed {spec.unit} 2>/dev/null; "
        # In the command that starts the job, whose end removes the token: a controller that stops
        # here leaves no token without a job.
        + (f"(\n{unpack_script(token)}\n) && " if token else "")
        + f"systemctl start --no-block {spec.unit}",
        stdin=pack_files(token) if token else None,
    )


def _token(work: Work) -> Iterator[ManagedFile]:
    """Yield the file with the hub's token, which the host removes when the job ends."""
    token = read_hub_token(work.hub) if work.hub else None
    if work.hub is None or token is None:
        return
    if work.hub.token is None:
        log_once(f"{work.job.title}: uses your Hugging Face login, on the host until the job ends")
    yield ManagedFile(hub_token_file(work.job.digest), f"{token}\n".encode(), 0o600)


def _link(target: str) -> str:
    """Return how a boot is told to go on with the work of a target; only while there is work."""
    return (
        f"systemctl daemon-reload; mkdir -p {BOOT_LINKS}; "
        f"ln -sfn {UNITS_DIR}/{PREPARE.of('')} {BOOT_LINKS}/{target}; "
        "systemctl daemon-reload"
    )


def _retire(targets: Sequence[str]) -> str:
    """Return how no boot goes on with the work of targets any more; what runs is left to end."""
    links = " ".join(f"{BOOT_LINKS}/{target} {drop_in_dir(target)}" for target in targets)
    return (
        f"rm -rf {links}; systemctl stop {' '.join(targets)} 2>/dev/null; systemctl daemon-reload"
    )


def _pulled_in(spec: Job, release: str) -> ManagedFile:
    text = f"[Unit]\nRequires={spec.unit}\nAfter={spec.unit}\n"
    path = f"{drop_in_dir(PREPARE.of(release))}/{spec.digest12}.conf"
    return ManagedFile(path, text.encode())


@operation()
@host_errors
def wait_for_jobs(
    jobs: Sequence[Job],
    release: str,
    timeout_s: int = PREPARE_TIMEOUT_S,
    retire_others: bool = False,
) -> Commands:
    """Wait until every job has its proof; show progress, and the log of what failed.

    Args:
        jobs: all work of the release.
        release: whose prepare target is retired when all is done.
        timeout_s: give up waiting after this long; the work itself goes on.
        retire_others: ``release`` is what is wanted now; no boot goes on with the work of
            releases of its service that were given up before they were built.
    """
    names = tuple(spec.digest12 for spec in jobs)
    target = PREPARE.of(release)
    # Without jobs only what boots is of interest, which every answer tells.
    known = None if names else find_answer(JobStates)
    found = known or read_fact(JobStates, jobs=names, target=target)
    given_up = _given_up(found.linked, release) if retire_others else ()
    if found.done(names) and target not in found.linked and not given_up:
        host.noop(f"{len(names)} jobs are proven")
        return
    if given_up:
        yield shell(_retire(given_up))
    if found.done(names) and target not in found.linked:
        return
    yield FunctionCommand(_wait, [tuple(jobs), timeout_s], {})
    yield shell(_retire((target,)))


def _given_up(linked: Sequence[str], release: str) -> tuple[str, ...]:
    service = release.rpartition("-")[0]
    named = {one: RELEASE_NAME.match(PREPARE.instance(one)) for one in linked}
    return tuple(
        one
        for one, name in named.items()
        if name and name["service"] == service and name[0] != release
    )


def _wait(state: State, host: Host, jobs: Sequence[Job], timeout_s: int) -> bool:
    titles = {spec.digest12: spec.title for spec in jobs}
    deadline = time.monotonic() + timeout_s
    said: dict[str, tuple[str, float]] = {}
    while time.monotonic() < deadline:
        ok, out, err = run_reconnecting(host, poll_command(tuple(titles)))
        if not ok:
            host.log_styled(f"cannot read the jobs: {err.strip() or out.strip()}", fg="red")
            return False
        states = parse_poll(out)
        for name, title in titles.items():
            _log_progress(host, title, states.get(name), said)
        if any(states[name].state == "failed" for name in titles if name in states):
            return _show_failures(host, titles, states)
        if all(name in states and states[name].state == "done" for name in titles):
            return True
        gevent.sleep(POLL_EVERY_S)
    host.log_styled(f"still not done after {timeout_s} s; run again to attach", fg="red")
    return False


def _log_progress(
    host: Host, title: str, state: JobState | None, said: dict[str, tuple[str, float]]
) -> None:
    """Print a job's progress before people start to wonder, and no more often; its end at once."""
    text = "not started" if state is None else f"{state.state}: {progress_text(state)}"
    if state is not None and state.state == "done":
        text = "done"
    last, when = said.get(title, ("", 0.0))
    now = time.monotonic()
    if text == last == "done" or (text != "done" and now - when < HEARTBEAT_S):
        return
    said[title] = (text, now)
    host.log(f"{title}: {text}")


def _show_failures(host: Host, titles: dict[str, str], states: dict[str, JobState]) -> bool:
    for name, state in states.items():
        if state.state != "failed":
            continue
        for line in state.log_tail:
            host.log(f"  {line}")
        host.log_styled(
            f"{titles[name]}: failed (exit status {state.exit_code})\n"
            f"  fix: see the lines above; `journalctl -u {JOB.of(name)}` has all of them",
            fg="red",
        )
    return False
