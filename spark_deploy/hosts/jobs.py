"""Start jobs on a host and wait for them.

systemd runs them: they continue without the controller and after a reboot, and the next run
attaches.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

import gevent
from pyinfra import host
from pyinfra.api import FunctionCommand, Host, State
from spark_contract.documents import parse
from spark_contract.job import CHECKPOINT_JOB, FETCH_JOB, Job, JobState, ReceiptProof
from spark_contract.orders import BuildPlan
from spark_contract.paths import hub_token_file
from spark_contract.units import BOOT_LINKS, JOB, PREPARE, RELEASE_NAME, UNITS_DIR, drop_in_dir

from spark_deploy.hosts.commands import HEARTBEAT_S, current_host, log_once, run_reconnecting, shell
from spark_deploy.hosts.downloads import with_known_peers
from spark_deploy.hosts.facts import find_cached_value, read_fact
from spark_deploy.hosts.files import pack_files, place_files, unpack_script
from spark_deploy.hosts.operations import Commands, host_command, host_operation, refuse, show
from spark_deploy.hosts.status import JobStates, parse_poll, poll_command
from spark_deploy.lock.headers import read_hub_token
from spark_deploy.plan.jobs import Work
from spark_deploy.plan.types import ManagedFile

POLL_EVERY_S = 2.0
# Hashes of the FP8 source's tensors that hosts of this run used, by digest of the checkpoint.
_donor_hashes: WeakKeyDictionary[Host, dict[str, str]] = WeakKeyDictionary()
PREPARE_TIMEOUT_S = 6 * 3600


def progress_text(state: JobState) -> str:
    if state.state == "unknown":
        return state.result
    if state.progress is None:  # the tool counts no bytes
        elapsed = f" ({state.elapsed_s} s)" if state.elapsed_s else ""
        return f"{state.last_line or state.result or 'starting'}{elapsed}"
    progress = state.progress
    parts = [progress.phase or "working"]
    done, total, left = progress.bytes, progress.total, progress.eta_s
    if done is not None and total:
        parts.append(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB")
    if progress.rate_bytes_per_s:
        parts.append(f"{progress.rate_bytes_per_s / 1e6:.0f} MB/s")
    if left is not None:
        parts.append(f"{left} s left" if left < 90 else f"{left / 60:.0f} min left")
    return ", ".join(parts)


@host_operation
def start_job(work: Work, release: str, names: tuple[str, ...]) -> Commands:
    """Start a job unless it runs or the receipt exists.

    ``names`` are all jobs of the release, so that a single fact serves all operations.
    """
    job, target = work.job, PREPARE.unit(release)
    jobs = read_fact(JobStates, jobs=names, target=target)
    state = jobs.states.get(job.digest12)
    if state is not None and state.state == "done":
        host.noop(f"{job.title}: proven by a receipt")
        return
    boot = ManagedFile(
        f"{drop_in_dir(target)}/{job.digest12}.conf",
        f"[Unit]\nRequires={job.unit}\nAfter={job.unit}\n".encode(),
    )
    if state is not None and state.state == "running":
        if target in jobs.linked and job.digest12 in jobs.pulled:
            host.noop(f"{job.title}: already running, attaching")
            return
        # Started for another release: from now on boots continue it for this release.
        yield from place_files((boot,))
        yield shell(_enable_at_boot(target))
        return
    if state is not None and state.state == "unknown":
        # A start on a guess would be reported as a change.
        refuse(f"{host.name}: {job.title}", progress_text(state), "run again when it answers")
    if job.kind == FETCH_JOB and not host.state.is_executing:
        host.log(f"{job.title}: not on this host, {job.total_bytes or 0} bytes to fetch")
    yield from place_files((*with_known_peers(work).files(), boot))
    token = [*_token_file(work)]
    yield shell(
        f"{_enable_at_boot(target)}; "
        # A stale status file would be mistaken for this attempt's.
        f"rm -f {job.dir}/status.json {job.dir}/progress; "
        f"systemctl reset-failed {job.unit} 2>/dev/null; "
        # A single command sends the token and starts the job, which removes the token: a killed
        # controller leaves none behind.
        + (f"(\n{unpack_script(token)}\n) && " if token else "")
        + f"systemctl start --no-block {job.unit}",
        stdin=pack_files(token) if token else None,
    )


def _token_file(work: Work) -> Iterator[ManagedFile]:
    """Yield the hub's token, which the host removes after the job."""
    token = read_hub_token(work.hub) if work.hub else None
    if work.hub is None or token is None:
        return
    if work.hub.token is None:
        log_once(f"{work.job.title}: uses your Hugging Face login, on the host during the job")
    yield ManagedFile(hub_token_file(work.job.digest), f"{token}\n".encode(), 0o600)


def _enable_at_boot(target: str) -> str:
    """Let a boot continue the jobs of a target."""
    return (
        f"systemctl daemon-reload; mkdir -p {BOOT_LINKS}; "
        f"ln -sfn {UNITS_DIR}/{PREPARE.unit('')} {BOOT_LINKS}/{target}; "
        "systemctl daemon-reload"
    )


def _disable_at_boot(targets: Sequence[str]) -> str:
    """Keep boots from continuing the jobs of targets; running jobs finish."""
    links = " ".join(f"{BOOT_LINKS}/{target} {drop_in_dir(target)}" for target in targets)
    return (
        f"rm -rf {links}; systemctl stop {' '.join(targets)} 2>/dev/null; systemctl daemon-reload"
    )


@host_operation
def wait_for_jobs(
    jobs: Sequence[Job],
    release: str,
    timeout_s: int = PREPARE_TIMEOUT_S,
    retire_others: bool = False,
) -> Commands:
    """Wait until all jobs have receipts; show progress, and the log of a failed job.

    After ``timeout_s`` jobs continue. With ``retire_others`` boots stop continuing jobs of replaced
    releases of the service.
    """
    names, target = tuple(job.digest12 for job in jobs), PREPARE.unit(release)
    # Every value contains the boot targets, all that matters without jobs.
    cached = None if names else find_cached_value(JobStates)
    states = cached or read_fact(JobStates, jobs=names, target=target)
    service = release.rpartition("-")[0]
    linked = {target: RELEASE_NAME.match(PREPARE.instance(target)) for target in states.linked}
    replaced = tuple(
        target
        for target, name in linked.items()
        if retire_others and name and name["service"] == service and name[0] != release
    )
    finished = states.done(names) and target not in states.linked
    _note_donor_hashes(current_host(), jobs, states.states)
    if finished and not replaced:
        host.noop(f"{len(names)} jobs are proven")
        return
    if replaced:
        yield shell(_disable_at_boot(replaced))
    if not finished:
        yield FunctionCommand(_wait, [tuple(jobs), timeout_s], {})
        yield shell(_disable_at_boot((target,)))


def _note_donor_hashes(at: Host, jobs: Sequence[Job], states: Mapping[str, JobState]) -> None:
    for job in jobs:
        state = states.get(job.digest12)
        if state and state.donor_sha256 and isinstance(job.proof, ReceiptProof):
            _donor_hashes.setdefault(at, {})[job.proof.digest] = state.donor_sha256


@host_operation
def compare_donor_tensors(jobs: Sequence[Work]) -> None:
    """Refuse a checkpoint from FP8 source tensors that differ from the lock or another host."""
    for work in jobs:
        proof = work.job.proof
        if work.job.kind != CHECKPOINT_JOB or not isinstance(proof, ReceiptProof):
            continue
        known = {at.name: hashes.get(proof.digest) for at, hashes in _donor_hashes.items()}
        own = known.get(host.name)
        order = parse(BuildPlan, work.inputs[-1].content.decode())
        expected = {"the lock": order.donor_sha256, **dict(sorted(known.items()))}
        for source, sha256 in expected.items():
            if own and sha256 and sha256 != own:
                refuse(
                    f"{host.name}: {proof.tree}",
                    f"was built from FP8 source tensors with sha256 {own}, {source} has {sha256}",
                    "check which hub or proxy sent different bytes; on the wrong host move the "
                    "directory away and run the deploy again",
                )
    host.noop("the FP8 source tensors match the lock and the other hosts")


@host_command
def _wait(_: State, host: Host, jobs: Sequence[Job], timeout_s: int) -> bool:
    titles = {job.digest12: job.title for job in jobs}
    deadline = time.monotonic() + timeout_s
    logged: dict[str, tuple[str, float]] = {}
    while time.monotonic() < deadline:
        ok, out, err = run_reconnecting(host, poll_command(tuple(titles)))
        if not ok:
            refuse(f"{host.name}: jobs", err.strip() or out.strip(), "run again to attach")
        states = parse_poll(out)
        for name, title in titles.items():
            state, (last, last_s) = states.get(name), logged.get(title, ("", 0.0))
            text = "not started" if state is None else f"{state.state}: {progress_text(state)}"
            if state is not None and state.state == "done":
                text = "done"
            due = last != "done" if text == "done" else time.monotonic() - last_s >= HEARTBEAT_S
            if due:
                logged[title] = (text, time.monotonic())
                host.log(f"{title}: {text}")
        # Asked for no names, the host reports every job.
        failed = [name for name in titles if name in states and states[name].state == "failed"]
        for name in failed:
            for line in states[name].log_tail:
                host.log(f"  {line}")
            show(
                host,
                f"{titles[name]}: failed (exit status {states[name].exit_code})\n"
                f"  fix: correct the cause above; full log: `journalctl -u {JOB.unit(name)}`",
            )
        if failed:
            return False
        if all(name in states and states[name].state == "done" for name in titles):
            _note_donor_hashes(host, jobs, states)
            return True
        gevent.sleep(POLL_EVERY_S)
    refuse(f"{host.name}: jobs", f"still not done after {timeout_s} s", "run again to attach")
