"""Start jobs on a host and wait for them; systemd continues them after a reboot."""

import time
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import gevent
from pyinfra import host
from pyinfra.api import FunctionCommand, Host, State
from spark_contract.builder_api import BuildPlan
from spark_contract.documents import parse
from spark_contract.job import CHECKPOINT_JOB, FETCH_JOB, Job, JobState, ReceiptProof
from spark_contract.paths import hub_token_file
from spark_contract.units import BOOT_LINKS, JOB, PREPARE, RELEASE_NAME, UNITS_DIR, drop_in_dir

from spark_deploy.hosts.commands import HEARTBEAT_S, current_host, log_once, run_reconnecting, shell
from spark_deploy.hosts.downloads import with_known_peers
from spark_deploy.hosts.facts import find_cached_value, read_fact
from spark_deploy.hosts.files import pack_files, place_files, unpack_script
from spark_deploy.hosts.operations import Commands, fail, host_command, host_operation, log_lines
from spark_deploy.hosts.status import JobStates, parse_poll, poll_command
from spark_deploy.lock.resolve import read_hub_token
from spark_deploy.plan.jobs import Work
from spark_deploy.plan.types import ManagedFile

POLL_EVERY_S = 2.0
# Hash of the FP8 source tensors that each host built from, by digest of the checkpoint.
_donor_hashes: WeakKeyDictionary[Host, dict[str, str]] = WeakKeyDictionary()
PREPARE_TIMEOUT_S = 6 * 3600


def describe_progress(state: JobState) -> str:
    if state.state == "unknown":
        return state.result
    if state.progress is None:  # the tool does not count bytes
        elapsed = f" ({state.elapsed_s} s)" if state.elapsed_s else ""
        return f"{state.last_line or state.result or 'starting'}{elapsed}"
    progress = state.progress
    parts = [progress.phase or "working"]
    if progress.bytes is not None and progress.total:
        parts.append(f"{progress.bytes / 1e9:.1f} of {progress.total / 1e9:.1f} GB")
    if progress.rate_bytes_per_s:
        parts.append(f"{progress.rate_bytes_per_s / 1e6:.0f} MB/s")
    eta_s = progress.eta_s
    if eta_s is not None:
        parts.append(f"{eta_s} s left" if eta_s < 90 else f"{eta_s / 60:.0f} min left")
    return ", ".join(parts)


@host_operation
def start_job(work: Work, release: str, names: tuple[str, ...]) -> Commands:
    """Start a job unless it is running or has a receipt.

    ``names`` lists all jobs of the release, so that a single fact reads all their states.
    """
    job, target = work.job, PREPARE.unit(release)
    jobs = read_fact(JobStates, jobs=names, target=target)
    state = jobs.states.get(job.digest12)
    if state is not None and state.state == "done":
        host.noop(f"{job.title}: complete")
        return
    boot_file = ManagedFile(
        f"{drop_in_dir(target)}/{job.digest12}.conf",
        f"[Unit]\nRequires={job.unit}\nAfter={job.unit}\n".encode(),
    )
    if state is not None and state.state == "running":
        if target in jobs.boot_targets and job.digest12 in jobs.jobs_in_target:
            host.noop(f"{job.title}: already running, attaching")
            return
        # A job started for another release continues for this release after a reboot.
        yield from place_files((boot_file,))
        yield shell(_enable_at_boot(target))
        return
    if state is not None and state.state == "unknown":
        # Starting a job that may be running would be reported as a change.
        fix = "run again when the host responds"
        fail(f"{host.name}: {job.title}", describe_progress(state), fix)
    if job.kind == FETCH_JOB and not host.state.is_executing:
        host.log(f"{job.title}: {job.total_bytes or 0} bytes to download")
    yield from place_files((*with_known_peers(work).files(), boot_file))
    token_files = _token_files(work)
    yield shell(
        f"{_enable_at_boot(target)}; "
        # A stale status file would be mistaken for this attempt's.
        f"rm -f {job.dir}/status.json {job.dir}/progress; "
        f"systemctl reset-failed {job.unit} 2>/dev/null; "
        # The same command stores the token and starts the job, which deletes it, so a killed
        # controller leaves no token behind.
        + (f"(\n{unpack_script(token_files)}\n) && " if token_files else "")
        + f"systemctl start --no-block {job.unit}",
        stdin=pack_files(token_files) if token_files else None,
    )


def _token_files(work: Work) -> list[ManagedFile]:
    if work.hub is None or (token := read_hub_token(work.hub)) is None:
        return []
    if work.hub.token is None:
        log_once(f"{work.job.title}: uses your Hugging Face login; the job deletes the token")
    return [ManagedFile(hub_token_file(work.job.digest), f"{token}\n".encode(), 0o600)]


def _enable_at_boot(target: str) -> str:
    """Return a script that lets systemd continue the jobs of a target after a reboot."""
    return (
        f"systemctl daemon-reload; mkdir -p {BOOT_LINKS}; "
        f"ln -sfn {UNITS_DIR}/{PREPARE.unit('')} {BOOT_LINKS}/{target}; "
        "systemctl daemon-reload"
    )


def _disable_at_boot(targets: Sequence[str]) -> str:
    """Return a script that reverts ``_enable_at_boot``; running jobs finish."""
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

    Jobs keep running after ``timeout_s``. With ``retire_others``, jobs of replaced releases do not
    continue after a reboot.
    """
    names, target = tuple(job.digest12 for job in jobs), PREPARE.unit(release)
    # Without jobs, only the targets enabled at boot matter, and every cached value lists them.
    cached = None if names else find_cached_value(JobStates)
    reported = cached or read_fact(JobStates, jobs=names, target=target)
    replaced = _replaced_targets(release, reported.boot_targets) if retire_others else ()
    is_finished = reported.are_done(names) and target not in reported.boot_targets
    _store_donor_hashes(current_host(), jobs, reported.states)
    if is_finished and not replaced:
        host.noop(f"{len(names)} jobs are complete")
        return
    if replaced:
        yield shell(_disable_at_boot(replaced))
    if not is_finished:
        yield FunctionCommand(_wait_until_done, [tuple(jobs), timeout_s], {})
        yield shell(_disable_at_boot((target,)))


def _replaced_targets(release: str, boot_targets: Sequence[str]) -> tuple[str, ...]:
    """Return the prepare targets of the service's other releases."""
    service = release.rpartition("-")[0]
    replaced = []
    for target in boot_targets:
        match = RELEASE_NAME.match(PREPARE.instance(target))
        if match and match["service"] == service and match[0] != release:
            replaced.append(target)
    return tuple(replaced)


def _store_donor_hashes(
    target_host: Host, jobs: Sequence[Job], states: Mapping[str, JobState]
) -> None:
    for job in jobs:
        state = states.get(job.digest12)
        if state and state.donor_sha256 and isinstance(job.proof, ReceiptProof):
            _donor_hashes.setdefault(target_host, {})[job.proof.digest] = state.donor_sha256


@host_operation
def compare_donor_tensors(jobs: Sequence[Work]) -> None:
    """Fail if a checkpoint's FP8 source tensors differ from the lock or from another host."""
    for work in jobs:
        proof = work.job.proof
        if work.job.kind != CHECKPOINT_JOB or not isinstance(proof, ReceiptProof):
            continue
        by_host = {other.name: hashes.get(proof.digest) for other, hashes in _donor_hashes.items()}
        actual = by_host.get(host.name)
        build_plan = parse(BuildPlan, work.inputs[-1].content.decode())
        for owner, expected in [("the lock", build_plan.donor_sha256), *sorted(by_host.items())]:
            if actual and expected and expected != actual:
                fail(
                    f"{host.name}: {proof.tree}",
                    f"this checkpoint was built from FP8 source tensors with sha256 {actual}, "
                    f"but {owner} has {expected}",
                    "find the hub or proxy that sent different bytes; on the host with the wrong "
                    "data, move the directory elsewhere, then run the deploy again",
                )
    host.noop("the FP8 source tensors match the lock and the other hosts")


@host_command
def _wait_until_done(state: State, host: Host, jobs: Sequence[Job], timeout_s: int) -> bool:
    titles = {job.digest12: job.title for job in jobs}
    logged: dict[str, tuple[str, float]] = {}
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        result = run_reconnecting(host, poll_command(tuple(titles)))
        if not result.ok:
            fail(f"{host.name}: jobs", result.text, "run again to wait for the same jobs")
        reported = parse_poll(result.stdout)
        # Without names, the host reports every job.
        states = {name: reported[name] for name in titles if name in reported}
        for name, title in titles.items():
            _log_progress(host, title, states.get(name), logged)
        failed = [name for name, state in states.items() if state.state == "failed"]
        for name in failed:
            _log_failed_job(host, titles[name], states[name], JOB.unit(name))
        if failed:
            return False
        if len(states) == len(titles) and all(state.state == "done" for state in states.values()):
            _store_donor_hashes(host, jobs, states)
            return True
        gevent.sleep(POLL_EVERY_S)
    message = f"not complete after {timeout_s} s"
    fail(f"{host.name}: jobs", message, "run again to wait for the same jobs")


def _log_progress(
    host: Host, title: str, state: JobState | None, logged: dict[str, tuple[str, float]]
) -> None:
    last_text, logged_at_s = logged.get(title, ("", 0.0))
    if state is not None and state.state == "done":
        text, is_due = "done", last_text != "done"
    else:
        text = "not started" if state is None else f"{state.state}: {describe_progress(state)}"
        is_due = time.monotonic() - logged_at_s >= HEARTBEAT_S
    if is_due:
        logged[title] = (text, time.monotonic())
        host.log(f"{title}: {text}")


def _log_failed_job(host: Host, title: str, state: JobState, unit: str) -> None:
    for line in state.log_tail:
        host.log(f"  {line}")
    log_lines(
        host,
        f"{title}: failed (exit status {state.exit_code})\n"
        f"  fix: correct the cause above; for the full log, run `journalctl -u {unit}`",
    )
